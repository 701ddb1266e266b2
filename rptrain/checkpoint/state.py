"""Save and load the exact state of training (parameters, optimizer state, position) in `checkpoint-<step>`.

    checkpoint-120/
      units/00003-layers.2.safetensors    flat: param, previous (async only), remainder or masters, and the moments
      base/                               config, tokenizer and chat template of the model, for the export
      trainer_state.json                  step, meta, and the tensors of each unit's file
      complete.json                       sizes and hashes of the rest; written last

Gradients are not stored, because a step consumes them. Frozen units are not stored either (frozen.py). Of a unit that
devices read in its wire format (engine/memory/wire.py), `previous` has the bytes of that format; older versions stored
the weights, which are quantized when they are read. The newest generation is made from `param`.

If several processes train the model, each writes its elements of a unit into a file of its own (unit_files.py), whose
tensors have these elements only; a wire format is in the file with element 0. The folder is on a file system that all
processes share. A checkpoint can be loaded by any number of processes, whatever number has saved it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rptrain.checkpoint.atomic_dir import (
    BASE,
    FORMAT,
    KIND,
    PIECE,
    REPLACED,
    STATE,
    THREADS,
    WHOLE,
    Damaged,
    complete_checkpoints,
    discard,
    is_of_kind,
    read_into,
    read_manifest,
    remove,
    set_aside,
)
from rptrain.checkpoint.metadata import read_facts
from rptrain.checkpoint.processes import ALONE, Processes, written_together
from rptrain.checkpoint.unchanged import check_unchanged
from rptrain.checkpoint.unit_files import by_unit, elements, part_file, unit_file
from rptrain.checkpoint.unit_tensors import (
    DTYPES,
    PARAM_HASH,
    START_HASH,
    WEIGHTS,
    Layout,
    Part,
    SavedTensor,
    header,
    saved_tensors,
)
from rptrain.engine.memory import wire
from rptrain.engine.memory.moments import kind_of
from rptrain.engine.memory.unit_state import UnitState
from rptrain.models.base_files import BaseFile, base_files, with_replaced
from rptrain.utils.dtypes import DTYPES as MODEL_DTYPES
from rptrain.utils.errors import UserError
from rptrain.utils.file_state import FileState
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import Phase, phase
from rptrain.utils.replacing import PARTIAL


@dataclass(frozen=True)
class Background:
    """How a checkpoint is written while training continues. No unit may change before `release` was called with its
    number. The units in `order` are written in this order. `proceed` is called before each piece is written; an
    exception from it ends the save. `progress` counts the bytes.
    """

    order: Sequence[int] = ()
    release: Callable[[int], object] = lambda unit: None
    proceed: Callable[[], object] = lambda: None
    progress: Phase | None = None


FOREGROUND = Background()  # nothing else goes on meanwhile


def save_state(
    checkpoints_dir: Path,
    units: Sequence[UnitState],
    *,
    step: int,
    meta: Mapping[str, Any],
    base: Mapping[str, BaseFile] | None = None,
    background: Background = FOREGROUND,
    processes: Processes = ALONE,
) -> Path:
    """Writes `checkpoint-<step>` and returns its path. Training may continue meanwhile, as far as `background` says.

    `meta` is JSON data that `load_state` returns again. `base` has the files of the base model (config, tokenizer and
    template; see `base_files`); None reads them from its directory, `meta["model_dir"]`. `meta["chat_template"]` (Jinja
    text) and `meta["config"]`, if present, replace the model's template and config. An incomplete checkpoint of this
    step is renamed. No tensor is copied in memory. `checkpoints_dir` is created, but not its parent. DiskFull if there
    is too little space.

    If several `processes` train the model, all call this at once. Each writes its part, and it returns in each once
    the checkpoint is complete. If one fails, none of them leaves a checkpoint; OtherFailed in the others.
    """
    target = Path(checkpoints_dir) / f"checkpoint-{step}"
    files: dict[str, BaseFile] = {}
    with processes.together():
        if processes.first:
            own = base_files(Path(meta["model_dir"])) if base is None else base
            files = with_replaced(own, meta.get("chat_template"), meta.get("config"))
            target.parent.mkdir(exist_ok=True)
            if os.path.lexists(target) and not is_of_kind(target, KIND):
                set_aside(target)
    places = {unit: place for place, unit in enumerate(background.order)}
    names = _trained(units)
    parts = {unit: _own_part(name, units[unit]) for unit, name in names.items()}
    parts = {unit: part for unit, part in parts.items() if part.elements.start < part.elements.stop}
    layouts: dict[str, Layout] = {}
    for each in processes.gather({part.file: part.layout for part in parts.values()}):
        layouts |= each
    needed = sum(len(data) for part in parts.values() for data in part.content)
    needed += sum(len(file.content) for file in files.values())

    progress = background.progress
    if progress is not None:
        progress.total = needed

    def pieces(part: Part) -> Iterator[bytes | memoryview]:
        yield header(part.layout)
        for data in part.content:
            for start in range(0, len(data), PIECE):
                background.proceed()
                yield (piece := data[start : start + PIECE])
                if progress is not None:
                    progress.add(len(piece))

    with written_together(target, {"kind": KIND, "step": step}, needed, processes) as aside:

        def write(unit: int) -> None:
            if part := parts.get(unit):
                starts = {PARAM_HASH: part.end_of("param")}
                if part.file != names[unit]:
                    starts[START_HASH] = part.end_of(*WEIGHTS)
                aside.write(part.file, pieces(part), starts)
            background.release(unit)

        with ThreadPoolExecutor(THREADS) as pool:  # not more: training needs the cores for torch's threads
            for _ in pool.map(write, sorted(names, key=lambda unit: places.get(unit, 0))):
                pass
        if processes.first:
            for name, file in files.items():
                aside.write(f"{BASE}/{name}", [file.content], mode=file.mode)
            ordered = {name: layouts[name] for name in sorted(layouts)}
            aside.write_json(STATE, {"format": FORMAT, "step": step, "meta": dict(meta), "units": ordered})
    return target


def read_state(directory: Path) -> dict[str, Any]:
    """The content of a checkpoint's trainer_state.json, without tensors. UserError if it is damaged or incomplete."""
    return read_facts(Path(directory))[0]


def load_state(directory: Path, units: Sequence[UnitState]) -> dict[str, Any]:
    """Loads the trainable units from a checkpoint and returns `step` and `meta`. Generation 0 becomes the current one.

    Damaged if a file is not as it was written. UserError if the checkpoint has another model, dtype, format of the
    moments or kind of update. Everything but the hashes of units is checked before a buffer is changed. After an error
    the content of the buffers is undefined.

    If several processes train the model, each loads what it has, and checks the hashes of what it reads. Call this
    within `Processes.together`, so that all find the same.
    """
    directory = Path(directory)
    state, files = read_facts(directory)
    stored = state["units"]
    expected = {name: units[index] for index, name in _trained(units).items()}
    names = by_unit(stored)
    if odd := names.keys() ^ expected.keys():
        raise UserError(f"{directory} belongs to another model: {min(odd)} is in one of them only")
    ranges = {whole: elements(directory, names[whole], unit.unit.numel) for whole, unit in expected.items()}

    def converted(whole: str) -> dict[str, SavedTensor]:
        return _converted(expected[whole], stored[names[whole][0]])

    def parts(whole: str) -> Sequence[Part]:
        tensors = saved_tensors(expected[whole]) | converted(whole)
        return [Part(file, part, tensors) for file, part in ranges[whole].items()]

    for part in chain.from_iterable(map(parts, expected)):
        _compare(directory / part.file, stored[part.file], part.layout)

    def read(part: Part) -> None:
        entry = files[part.file]
        if START_HASH in entry and not part.has_state:
            part, entry = part.of(*WEIGHTS), {WHOLE: entry[START_HASH]}
        read_into(directory / part.file, entry, part.buffers(stored[part.file]))

    writes: list[Callable[[], object]] = []
    for whole, unit in expected.items():
        unit.current, unit.before = 0, unit.generations - 1
        for previous in converted(whole).values():
            writes += wire.writes(unit.unit, previous.tensor, unit.wire[unit.before])
        writes += unit.wire_writes(unit.current)
    reads = sorted(chain.from_iterable(map(parts, expected)), key=lambda part: files[part.file]["size"], reverse=True)
    with phase(f"reading {directory.name}", sum(files[part.file]["size"] for part in reads), reads=True):
        in_parallel(read, reads)
    in_parallel(lambda write: write(), writes)
    return state


def checked_files(directory: Path) -> dict[Path, FileState]:
    """The states of all files of a checkpoint, after a check of their hashes. Those that were checked before and have
    not changed since are not hashed again. UserError names what is damaged.
    """
    directory = Path(directory)
    files = read_manifest(directory)["files"]
    states: dict[Path, FileState] = {}

    def check(name: str) -> None:
        states[directory / name] = check_unchanged(directory / name, files[name])

    with phase(f"hashing {directory.name}", sum(entry["size"] for entry in files.values()), reads=True):
        in_parallel(check, files)
    return states


def unusable(checkpoint: Path, error: Damaged) -> UserError:
    """What to say of a damaged checkpoint that was to be used, with the newest of its neighbors."""
    others = [path for path in complete_checkpoints(checkpoint.parent) if path.name != checkpoint.name]
    advice = f"use another checkpoint, such as {others[-1]}" if others else "its run has only this checkpoint"
    return UserError(f"{error}: {advice}")


def prune(checkpoints_dir: Path, keep: int | None, best: Path | None = None) -> None:
    """Deletes all but the newest `keep` checkpoints (None keeps all), and what a killed save left behind.

    `best` is always kept, in place of the oldest of these if there are several.
    """
    assert keep is None or keep >= 1
    complete = complete_checkpoints(Path(checkpoints_dir))
    stays = complete if keep is None else complete[-keep:]
    if best is not None and best not in stays:
        stays = [best, *stays[-max(len(stays) - 1, 1) :]]
    for path in list(Path(checkpoints_dir).glob("*checkpoint-*")):
        if path.name.endswith(PARTIAL):
            discard(path)
        elif path in complete:
            if path not in stays:
                remove(path)
        elif path.name.endswith(REPLACED) and is_of_kind(path, KIND):  # its replacement is complete
            remove(path)


def _trained(units: Sequence[UnitState]) -> dict[int, str]:
    """The trainable units, and the names that files with all of their elements have."""
    return {index: unit_file(index, state.unit.name) for index, state in enumerate(units) if state.unit.trainable}


def _own_part(whole: str, state: UnitState) -> Part:
    """The part of a unit that this process saves, which may be empty."""
    return Part(part_file(whole, state.own, state.unit.numel), state.own, saved_tensors(state))


def _converted(state: UnitState, stored: Layout) -> dict[str, SavedTensor]:
    """A place for a previous generation that an older version stored as weights, to be converted to the wire format.

    It is in the gradient's buffer, which holds nothing yet.
    """
    weights = "previous" in stored and stored["previous"]["dtype"] == stored["param"]["dtype"]
    if not (weights and len(state.wire) == 2):
        return {}
    flat = state.params[0]
    return {"previous": SavedTensor(state.grad.view(torch.uint8)[: flat.nbytes].view(flat.dtype))}


def dtype_of(state: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a checkpoint's model, from the result of `read_state`."""
    if "dtype" in state["meta"]:
        return MODEL_DTYPES[state["meta"]["dtype"]]
    name = next(iter(state["units"].values()))["param"]["dtype"]
    return next(dtype for dtype, known in DTYPES.items() if known == name)


def _compare(file: Path, stored: Layout, expected: Layout) -> None:
    """UserError that says how the saved state differs from the run's, and what to do."""
    if ("previous" in stored) != ("previous" in expected):
        update, other = ("async", "sync") if "previous" in stored else ("sync", "async")
        raise UserError(
            f'{file} was saved with optim.update = "{update}" and cannot be resumed with "{other}": set '
            f'optim.update = "{update}", or export the checkpoint and start a new run from it'
        )
    there, here = stored["param"], expected["param"]
    if there["dtype"] != here["dtype"]:
        names = {value: str(key).removeprefix("torch.") for key, value in DTYPES.items()}
        raise UserError(
            f'{file} was saved with model.dtype = "{names[there["dtype"]]}" and cannot be resumed with '
            f'"{names[here["dtype"]]}": set model.dtype, or export the checkpoint and start a new run from it'
        )
    if "previous" in stored and stored["previous"]["dtype"] == DTYPES[torch.uint8] != expected["previous"]["dtype"]:
        raise UserError(
            f"{file} was saved with engine.fp8 = true and cannot be resumed without: set engine.fp8 = true, or export "
            "the checkpoint and start a new run from it"
        )
    kinds = {name: kind for kind, name in DTYPES.items()}
    saved, wanted = (kind_of(kinds[layout["exp_avg"]["dtype"]]) for layout in (stored, expected))
    if saved != wanted:
        raise UserError(
            f'{file} was saved with optim.moments = "{saved}" and cannot be resumed with "{wanted}": set '
            f'optim.moments = "{saved}", or export the checkpoint and start a new run from it'
        )
    if stored != expected:
        odd = next(name for name in {**stored, **expected} if stored.get(name) != expected.get(name))
        raise UserError(f"{file} belongs to another model: {odd} is {stored.get(odd)}, not {expected.get(odd)}")
