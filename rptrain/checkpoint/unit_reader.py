"""Read the trainable units of a checkpoint to use them, and compare them with their hashes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rptrain.checkpoint.atomic_dir import read_manifest
from rptrain.checkpoint.unchanged import check_state, check_unchanged, fill, read_start
from rptrain.checkpoint.unit_files import by_unit, elements, unit_file
from rptrain.checkpoint.unit_tensors import PARAM_HASH, Layout, header
from rptrain.models.spec import ModelSpec
from rptrain.models.weights.safetensors_io import as_bytes
from rptrain.utils.file_state import FileState
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import phase


class UnitReader:
    """Reads the trainable units of a checkpoint, whose content is `state`. Thread-safe.

    Files from an earlier version, which have no hash of the parameters alone, are hashed as a whole at once. Damaged if
    one is not as it was saved.
    """

    def __init__(self, checkpoint: Path, state: Mapping[str, Any], spec: ModelSpec) -> None:
        self._checkpoint, self._units, self._spec = checkpoint, state["units"], spec
        self._files = read_manifest(checkpoint)["files"]
        self._names = by_unit(state["units"])
        earlier = [checkpoint / name for name in state["units"] if PARAM_HASH not in self._files[name]]
        self._checked: dict[Path, FileState] = {}

        def check(file: Path) -> None:
            self._checked[file] = check_unchanged(file, self._files[str(file.relative_to(checkpoint))])

        if earlier:
            with phase(f"hashing {checkpoint.name}", sum(file.stat().st_size for file in earlier), reads=True):
                in_parallel(check, earlier)

    @property
    def nbytes(self) -> int:
        """The bytes that are read of all units: the headers of their files and the parameters."""
        return sum(len(header(layout)) + _parameter_bytes(layout) for layout in self._units.values())

    def read(self, index: int, flat: Tensor) -> None:
        """Fills the flat buffer of a unit's parameters, in its type. Damaged if a file is not as it was."""
        unit = self._spec.units[index]
        for name, part in elements(self._checkpoint, self._names[unit_file(index, unit.name)], unit.numel).items():
            file, entry = self._checkpoint / name, self._files[name]
            buffers = memoryview(bytearray(len(header(self._units[name])))), as_bytes(flat[part])
            if PARAM_HASH in entry:
                read_start(file, entry, PARAM_HASH, buffers)
            else:
                fill(file, buffers)
                check_state(file, self._checked[file])


def _parameter_bytes(layout: Layout) -> int:
    start, stop = layout["param"]["data_offsets"]
    return stop - start
