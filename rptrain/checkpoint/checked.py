"""Weights that are compared with the digests that were recorded when they were written, before anything uses them.

The manifest of an export has the digests of its tensors (`WEIGHTS`), that of an adapter those of the base that it was
trained on (`BASE_WEIGHTS`), in groups: see models/weights/digests.py. Exports of earlier versions have the hashes of
whole files alone, and their adapters nothing about the base. Other directories have no manifest: nothing is known about
their weights.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rptrain.checkpoint.atomic_dir import FORMAT, MANIFEST, Damaged
from rptrain.checkpoint.export_progress import KIND
from rptrain.checkpoint.frozen import stored_bytes, tensor_names
from rptrain.checkpoint.unchanged import check_state, check_unchanged
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.weights import pretrained
from rptrain.models.weights.digests import TensorDigests
from rptrain.models.weights.pretrained import StoredView, WeightFiles
from rptrain.utils.errors import UserError
from rptrain.utils.file_state import FileState
from rptrain.utils.files import read_small_text
from rptrain.utils.objects import unique_keys
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import phase

# Keys of an export's manifest: digests of groups of tensors, of the base's, and SHA-256 of carried tensors.
WEIGHTS, BASE_WEIGHTS, CARRIED = "weights", "base_weights", "carried"


@dataclass(frozen=True)
class Recorded:
    """Digests that weights had. `names`: the tensors that they cover; None: all of the model.

    `files`: the states of files that were hashed as a whole, as `check_files` returns them.
    """

    groups: Mapping[str, str]
    advice: str  # what is wrong if they differ, and what to do
    names: Collection[str] | None = None
    files: Mapping[Path, FileState] = field(default_factory=dict[Path, FileState])

    def check(self, digests: TensorDigests | None) -> None:
        """UserError if a group that was hashed differs, or if a file was changed since it was hashed."""
        check_states(self.files)
        if digests is None:
            return
        for group, files in digests.differing(self.groups, self.names).items():
            raise UserError(f"{' or '.join(map(str, files))}: the weights of {group} {self.advice}")


def recorded(directory: Path, files: Iterable[Path]) -> list[Recorded]:
    """What the manifest of an export records of its weights; empty for another directory.

    Of an export of an earlier version, the hashes of these weight files are compared here. UserError if the manifest is
    damaged, or if a file is not one that was exported.
    """
    manifest = read_export(directory)
    if manifest is None:
        return []
    advice = f"differ from those that were exported: {_restore(directory)}"
    if groups := recorded_groups(manifest, WEIGHTS, directory):
        return [Recorded(groups, advice)]
    return [Recorded({}, advice, (), check_files(directory, files))]


def recorded_base(adapter: Path, base: Path, spec: ModelShape, tensors: Collection[str]) -> list[Recorded]:
    """What the manifest of an exported adapter records of its base; empty if there is none. `spec` has the adapter;
    `tensors` are the base model's.
    """
    groups = recorded_groups(read_export(adapter) or {}, BASE_WEIGHTS, adapter)
    if not groups:
        return []
    advice = (
        f"differ from those that the adapter {adapter} was trained on: restore the files in {base}, or set "
        f"base_model_name_or_path in its adapter_config.json to the model that it was trained on; if the base was "
        f"changed on purpose, delete {adapter / MANIFEST}"
    )
    units = [spec.units[index] for index in spec.frozen]
    return [Recorded(groups, advice, tensor_names(units, tensors))]


def check_files(directory: Path, files: Iterable[Path]) -> dict[Path, FileState]:
    """Compares files of an export with its manifest; does nothing in another directory. UserError if one differs.

    Returns the states of the files, which are compared with `check_states` after the files were read again.
    """
    manifest = read_export(directory)
    if manifest is None:
        return {}
    entries = {directory / name: entry for name, entry in manifest["files"].items()}
    files = [*files]
    if other := [file for file in files if not isinstance(entries.get(file), dict)]:
        raise UserError(f"{other[0]} was not there when {directory} was exported: {_restore(directory)}")
    states: dict[Path, FileState] = {}

    def check(file: Path) -> None:
        states[file] = check_unchanged(file, entries[file])

    try:
        with phase(f"hashing {directory.name}", sum(file.stat().st_size for file in files), reads=True):
            in_parallel(check, files)
    except Damaged as error:
        raise UserError(f"{error}: {_restore(directory)}") from error
    return states


def check_states(states: Mapping[Path, FileState]) -> None:
    """Damaged if a file was changed since it was checked."""
    for file, state in states.items():
        check_state(file, state)


def check_carried(directory: Path, found: Mapping[str, str]) -> None:
    """UserError if carried tensors of an export, with these hashes, are not those that were exported."""
    known = recorded_groups(read_export(directory) or {}, CARRIED, directory)
    if changed := [name for name, digest in known.items() if found.get(name) != digest]:
        raise UserError(f"{directory}: {changed[0]} differs from what was exported: {_restore(directory)}")


def load(
    files: WeightFiles,
    spec: ModelSpec,
    view: StoredView,
    known: Iterable[Recorded],
    units: Collection[int] | None = None,
) -> None:
    """As `pretrained.load`, and compares what it loads with what is recorded. UserError if it differs."""
    known = [*known]
    digests = TensorDigests(files.tensors, files.stamps) if any(each.groups for each in known) else None
    read = spec.units if units is None else [spec.units[index] for index in units]
    with phase("reading weights", stored_bytes(files, read), reads=True):
        pretrained.load(files, spec, view, units, digests)
    for each in known:
        each.check(digests)
    if digests is not None:
        digests.keep()


def hashed(files: WeightFiles) -> dict[str, str]:
    """The digests of all tensors of a model, as an export's manifest has them."""
    digests = TensorDigests(files.tensors, files.stamps)
    with phase("hashing weights", sum(stored.nbytes for stored in files.tensors.values()), reads=True):
        in_parallel(lambda work: work(), (work for stored in files.tensors.values() for work in digests.works(stored)))
    return digests.groups()


def read_export(directory: Path) -> dict[str, Any] | None:
    """The manifest of an export, whose other files may have been edited since; None if there is none. UserError if it
    cannot be read.
    """
    file = directory / MANIFEST
    if not file.is_file():
        return None
    try:
        found = json.loads(read_small_text(file), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}): {_restore(directory)}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        return None
    if found.get("format") != FORMAT:
        raise UserError(f"{file} has format {found.get('format')}; this version reads format {FORMAT}")
    if not isinstance(found.get("files"), dict):
        raise UserError(f"{file} is damaged (it has no files): {_restore(directory)}")
    return found


def recorded_groups(manifest: Mapping[str, Any], key: str, directory: Path) -> dict[str, str]:
    """Digests in a manifest by group; empty if they are missing. UserError if they are not text."""
    found = manifest.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(digest, str) for digest in found.values()):
        raise UserError(f"{directory / MANIFEST} is damaged ({key}): {_restore(directory)}")
    return found


def _restore(directory: Path) -> str:
    return (
        f"restore the file or export the model again; if it was changed on purpose, delete {directory / MANIFEST}, and "
        "it is used unchecked"
    )
