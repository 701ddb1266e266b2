"""Export a run, a checkpoint or a model in memory to a directory in the layout of Hugging Face."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rptrain.checkpoint import frozen
from rptrain.checkpoint.adapter import Adapter, shapes, write
from rptrain.checkpoint.atomic_dir import (
    BASE,
    MANIFEST,
    Damaged,
    check_hash,
    check_name,
    complete_checkpoints,
    read_manifest,
    written_aside,
)
from rptrain.checkpoint.checked import BASE_WEIGHTS, CARRIED, WEIGHTS, hashed
from rptrain.checkpoint.consistent import read_model
from rptrain.checkpoint.export_progress import KIND, ExportProgress, Report
from rptrain.checkpoint.metadata import CHECKPOINTS, EVENTS, RUN_CONFIG
from rptrain.checkpoint.result import checkpoint_of
from rptrain.checkpoint.run_states import facts
from rptrain.checkpoint.state import checked_files, dtype_of, read_state, unusable
from rptrain.checkpoint.target_lock import locked
from rptrain.checkpoint.unchanged import check_state
from rptrain.checkpoint.unit_files import by_unit, elements, unit_file
from rptrain.checkpoint.verify import verify, verify_adapter
from rptrain.data.eos import FROM_CONFIG, generation_config, special_tokens
from rptrain.engine.optim.adam import join
from rptrain.kernels.reference.dense import wide
from rptrain.models.base_files import CONFIG, GENERATION, PROCESSORS, BaseFile, base_files, with_contents, with_replaced
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.lora import merged, without_adapters
from rptrain.models.transforms.quantize import base_of
from rptrain.models.weights import pretrained
from rptrain.models.weights.carried import NOTHING, Carried
from rptrain.models.weights.pretrained import View
from rptrain.models.weights.safetensors_io import read_header, read_one
from rptrain.utils.dtypes import DTYPES
from rptrain.utils.errors import UserError, describe
from rptrain.utils.file_state import FileState
from rptrain.utils.files import change_mode
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import phase


@dataclass(frozen=True)
class ModelInMemory:
    """A model in memory to export. `view` gives its parameters, `carried` other tensors. `ends`: EOS ids besides the
    base model's own. `chat_template`: as in `with_replaced`. `step` and `loss`: the step of the run after which the
    parameters were these, and the validation loss; None: unknown.

    With `adapter`, only the adapter is exported; `base_weights` are the digests of the base that it was trained on.
    """

    view: View
    spec: ModelSpec
    adapter: Adapter | None = None
    base_weights: Mapping[str, str] = field(default_factory=dict)
    carried: Carried = NOTHING
    ends: Collection[int] = ()
    chat_template: str | None = None
    step: int | None = None
    loss: float | None = None


@dataclass(frozen=True)
class _Content:
    """What an export has: parameters, an adapter's or a whole model's with the tensors `carried`; all other `files`;
    and the `facts` that its manifest records about its state.
    """

    view: View
    spec: ModelSpec
    files: dict[str, BaseFile]
    facts: Mapping[str, Any]
    carried: Carried = NOTHING
    adapter: Adapter | None = None


def export(
    source: Path,
    to: Path,
    dtype: str | None = None,
    *,
    merge: bool = False,
    force: bool = False,
    report: Report | None = None,
    tell: Callable[[str], object] = lambda said: None,
) -> Path:
    """Writes the result of a run, or the weights of a checkpoint, to the directory `to` and returns it.

    If adapters were trained, the export is an adapter in the format of PEFT, or with `merge` the whole model with the
    adapters added to its weights. `dtype` None keeps the run's; another is converted from the exact master weights. The
    hashes of the checkpoint are checked first, and the export is read back.

    UserError if the source has no checkpoint or a damaged one, if there are no adapters to merge, if `to` overlaps what
    is read or the folder of a run, if `to` exists and is not an earlier export (`force` replaces it), or if
    another process exports to it (see `target_lock`). DiskFull if space is short. `report` is called while it works,
    `tell` once with a sentence that names the state that is exported.
    """
    source = Path(source)
    progress = ExportProgress(report)
    checkpoint, said = checkpoint_of(source)
    kind = _dtype(dtype)
    state = read_state(checkpoint)
    step = state["step"]
    tell(f"{checkpoint}: {said or f'step {step}'}")
    to = checked_target(to, source, checkpoint, state, force=force)
    with locked(to, force=force):
        return _export(checkpoint, state, to, kind, progress, merge=merge, force=force)


def _export(
    checkpoint: Path,
    state: Mapping[str, Any],
    to: Path,
    kind: torch.dtype | None,
    progress: ExportProgress,
    *,
    merge: bool,
    force: bool,
) -> Path:
    """Writes a checkpoint to a target that this process has locked."""
    if not force:
        try:
            _check_earlier(to)
        except UserError as error:
            raise UserError(f"{error}, choose another directory, or add --force to replace it") from error
    try:
        with progress.doing("checking"):
            states = checked_files(checkpoint)
    except Damaged as error:
        raise unusable(checkpoint, error) from error
    base = with_replaced(base_files(checkpoint / BASE), state["meta"].get("chat_template"))
    lora, ends = state["meta"].get("lora"), state["meta"].get("ends", [])
    exported = facts(state["step"], state["meta"].get("validation", {}).get("loss"))
    if merge and lora is None:
        raise UserError(f"{checkpoint} has no adapters to merge: export it without --merge")
    if merge:
        kind = kind or dtype_of(state)
        spec, view = from_checkpoint(checkpoint, states, wide(kind))
        carried = frozen.carried(state["meta"], spec)
        base = with_contents(base, generation_config(checkpoint / BASE, spec.config, ends))
        whole = _Content(merged(spec, view), without_adapters(spec), base, exported, carried)
        return _write(whole, to, kind, progress, force=force)
    spec, view = from_checkpoint(checkpoint, states, kind)
    generation = generation_config(checkpoint / BASE, spec.config, ends)
    if lora is not None:
        files = with_contents(_without_model(base), generation)
        known = exported | _of_base(state["meta"]["frozen"].get("stored", {}))
        made = _Content(view, spec, files, known, adapter=Adapter.of(lora))
        return _write(made, to, kind or dtype_of(state), progress, force=force)
    carried = frozen.carried(state["meta"], spec)
    whole = _Content(view, spec, with_contents(base, generation), exported, carried)
    return _write(whole, to, kind, progress, force=force)


def export_store(model: ModelInMemory, base_dir: Path, to: Path, dtype: str | None = None) -> Path:
    """Writes a model in memory as `export` does, with the other files of `base_dir`. The parent folder of `to` must
    exist.
    """
    spec, base, to = model.spec, with_replaced(base_files(Path(base_dir)), model.chat_template), _absolute(to)
    generation, known = generation_config(Path(base_dir), spec.config, model.ends), facts(model.step, model.loss)
    _check_earlier(to)
    if model.adapter is None:
        made = _Content(model.view, spec, with_contents(base, generation), known, model.carried)
    else:
        files, known = with_contents(_without_model(base), generation), known | _of_base(model.base_weights)
        made = _Content(model.view, spec, files, known, adapter=model.adapter)
    return _write(made, to, _dtype(dtype), ExportProgress())


def _of_base(digests: Mapping[str, str]) -> dict[str, Any]:
    """What the manifest of an adapter records about its base; nothing if the digests are unknown."""
    return {BASE_WEIGHTS: dict(digests)} if digests else {}


def _without_model(base: Mapping[str, BaseFile]) -> dict[str, BaseFile]:
    """The files of an adapter. With the model's config, loaders would take the directory for a whole model."""
    left_out = (CONFIG, GENERATION, *PROCESSORS)
    return {name: file for name, file in base.items() if name not in left_out}


def _write(
    made: _Content, to: Path, dtype: torch.dtype | None, progress: ExportProgress, *, force: bool = False
) -> Path:
    """Writes an adapter or a whole model. `dtype` None: that of the parameters."""
    dtype = dtype or made.view(0, made.spec.units[0].params[0].name).dtype
    if made.adapter is None:
        _write_model(made, to, dtype, progress, force=force)
    else:
        _write_adapter(made, made.adapter, to, dtype, progress, force=force)
    return to


def _write_model(made: _Content, to: Path, dtype: torch.dtype, progress: ExportProgress, *, force: bool) -> None:
    spec, files, carried = made.spec, made.files, made.carried
    weights = pretrained.stored_bytes(spec, dtype) + carried.nbytes
    known: dict[str, Any] = {"kind": KIND, **made.facts}
    with written_aside(to, known, weights + _bytes(files), check_names, force=force) as aside:
        with progress.doing("writing", weights):
            saved = pretrained.save(aside.path, spec, made.view, dtype, wrote=progress.wrote, carried=carried)
        written = aside.path / CONFIG  # with the weights: it names their dtype
        change_mode(written, written.stat().st_mode & (files[CONFIG].mode | 0o600))
        for name, file in files.items():
            if name != CONFIG:
                aside.write(name, [file.content], mode=file.mode)
        if GENERATION not in files:
            aside.write_json(GENERATION, {FROM_CONFIG: True, **special_tokens(spec.config)})
        with progress.doing("reading back"):
            verify(aside.path, spec, carried)
        known |= {WEIGHTS: hashed(saved)} | ({CARRIED: dict(carried.sha256)} if carried.sha256 else {})


def _write_adapter(
    made: _Content, adapter: Adapter, to: Path, dtype: torch.dtype, progress: ExportProgress, *, force: bool
) -> None:
    spec = made.spec
    weights = sum(map(prod, shapes(spec).values())) * dtype.itemsize
    known = {"kind": KIND, **made.facts, "base": base_of(spec), "architecture": spec.architecture}
    with written_aside(to, known, weights + _bytes(made.files), check_names, force=force) as aside:
        with progress.doing("writing", weights):
            write(aside, spec, made.view, adapter, dtype, progress.wrote)
        for name, file in made.files.items():
            aside.write(name, [file.content], mode=file.mode)
        with progress.doing("reading back"):
            verify_adapter(aside.path, spec, adapter)


def _bytes(files: Mapping[str, BaseFile]) -> int:
    return sum(len(file.content) for file in files.values())


def from_checkpoint(
    checkpoint: Path, states: Mapping[Path, FileState], dtype: torch.dtype | None = None
) -> tuple[ModelSpec, View]:
    """The model of a checkpoint, whose files were checked in these `states`, and its parameters, of which two units are
    in memory at a time.

    Another `dtype` than the run's gives the master weights. Frozen units are read from their source in the run, when
    the first of them is requested. UserError if something is missing, incomplete or changed.
    """
    state, spec = read_model(checkpoint)
    names = by_unit(state["units"])

    @cache
    def base() -> Callable[[int], dict[str, Tensor]]:
        return frozen.reader(state["meta"], spec, dtype_of(state))

    @lru_cache(maxsize=2)  # merging an adapter needs its unit and the unit of its base
    def parameters(index: int) -> dict[str, Tensor]:
        unit = spec.units[index]
        if not unit.trainable:
            return base()(index)
        parts = elements(checkpoint, names[unit_file(index, unit.name)], unit.numel)
        files = [checkpoint / name for name in parts]
        flats = [_read_flat(file, dtype) for file in files]
        for file in files:
            check_state(file, states[file])
        return unit.views(flats[0] if len(flats) == 1 else torch.cat(flats))

    return spec, lambda index, name: parameters(index)[name]


def _read_flat(file: Path, dtype: torch.dtype | None) -> Tensor:
    """The parameters in a unit's file; their master weights if `dtype` is another one."""
    try:
        stored = read_header(file)
        other = dtype not in (None, stored["param"].dtype)
        if other and "masters" in stored:
            return read_one(stored["masters"])
        flat = read_one(stored["param"])
        return join(flat, read_one(stored["remainder"])) if other and "remainder" in stored else flat
    except (UserError, KeyError) as error:
        raise Damaged(f"{file} is damaged: {describe(error)}") from error


def checked_target(to: Path, source: Path, checkpoint: Path, state: Mapping[str, Any], *, force: bool) -> Path:
    """The absolute path of a target that is written from a checkpoint with this `state`.

    UserError if its name cannot be used, if it overlaps what is read or the folder of a run, or if it holds the current
    or the home directory.
    """
    to = _absolute(to)
    _check_place(to)
    _check_inputs(to, _inputs(source, checkpoint, state["meta"].get("model_dir")))
    _check_runs(to, force)
    return to


def _absolute(to: Path) -> Path:
    """The absolute target path, whose last part is a name. UserError if the name is too long or not UTF-8 text."""
    to = Path(to).absolute()
    to = Path(os.path.realpath(to)) if to.name == ".." else to
    check_name(to)
    if str(to) != str(to).encode(errors="replace").decode():
        raise UserError(f"the path {to} is not UTF-8 text: choose another one")
    return to


def _check_earlier(to: Path) -> None:
    """Checks names, sizes and hashes of an earlier export. UserError as in `check_names`."""
    files = check_names(to)
    try:
        with phase(f"hashing {to.name}", sum(entry["size"] for entry in files.values()), reads=True):
            in_parallel(lambda name: check_hash(to / name, files[name]), files)
    except Damaged as error:
        raise UserError(f"{error}. {to} was changed since it was exported: move it away") from error


def check_names(to: Path) -> Mapping[str, Mapping[str, Any]]:
    """Checks by names and sizes that a target directory is missing or an earlier export. Returns the files of its
    manifest. UserError if it has files that were not exported, or that were changed since.
    """
    if not os.path.lexists(to):
        return {}
    if to.is_symlink() or not to.is_dir():
        raise UserError(f"{to} is a file or a link: move it away")
    try:
        manifest = read_manifest(to) if (to / MANIFEST).is_file() else {}
    except Damaged as error:
        raise UserError(f"{error}. {to} was changed since it was exported: move it away") from error
    files = manifest["files"] if manifest.get("kind") == KIND else {}
    known = {Path(MANIFEST), *map(Path, files)} if files else set[Path]()
    known |= {parent for file in known for parent in file.parents}
    if foreign := next((path for path in _walk(to) if path not in known), None):
        raise UserError(f"{to} is not empty: it holds {foreign}, which was not exported: move it away")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """The paths in a folder, relative to it: each folder before its contents, in order of names."""
    for level, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(level, name).relative_to(folder) for name in sorted(folders + files))


def _inputs(source: Path, checkpoint: Path, model_dir: str | None) -> dict[str, Path]:
    """The folders that an export reads, by description."""
    run = Path(os.path.realpath(checkpoint)).parent.parent
    found = {"the run": run} if (run / RUN_CONFIG).is_file() else {}
    found |= {"the source": source, "the checkpoint": checkpoint}
    if model_dir:
        found["the base model"] = Path(model_dir)
    return found


def _check_place(to: Path) -> None:
    """UserError if the target is or contains the current or the home directory, as with an empty shell variable."""
    for name, folder in (("the current directory", Path.cwd()), ("your home directory", Path(os.path.expanduser("~")))):
        if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(to)):
            raise UserError(f"{to} is or holds {name}: name a new directory to export to")


def _check_inputs(to: Path, inputs: Mapping[str, Path]) -> None:
    """UserError if the target is one of these folders, lies in one, or contains one or a target of its links."""
    places = _places(to)
    for name, folder in inputs.items():
        folder = Path(os.path.realpath(folder))
        entries = folder.iterdir() if folder.is_dir() else ()
        links = [Path(os.path.realpath(entry)) for entry in entries if entry.is_symlink()]
        inside = any(entry.is_relative_to(place) for entry in (folder, *links) for place in places)
        if inside or any(place.is_relative_to(folder) for place in places):
            raise UserError(f"{to} overlaps {name}, {folder}, which the export reads: choose a directory outside of it")


def _check_runs(to: Path, force: bool) -> None:
    """UserError if the target is, lies in, or holds the folder of a run, where it would be taken for a part of it."""
    for place in sorted(_places(to)):
        if run := next(filter(_is_run, (place, *place.parents)), None):
            raise UserError(f"{to} is in the folder of a run, {run}: choose another directory")
        configs = place.rglob(RUN_CONFIG) if force else ()  # otherwise anything in it is refused
        if run := next(filter(_is_run, (config.parent for config in configs)), None):
            raise UserError(f"{to} holds the folder of a run, {run}: choose another directory")


def _is_run(folder: Path) -> bool:
    if not (folder / RUN_CONFIG).is_file():
        return False
    return (folder / EVENTS).is_file() or bool(complete_checkpoints(folder / CHECKPOINTS))


def _places(to: Path) -> set[Path]:
    """Where a target is, and where it leads to if it is a link."""
    return {Path(os.path.realpath(to)), Path(os.path.realpath(to.parent)) / to.name}


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None
