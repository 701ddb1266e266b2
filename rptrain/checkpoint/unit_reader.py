"""Read the trainable units of a checkpoint to use them, and compare them with their hashes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rptrain.checkpoint.atomic_dir import read_manifest
from rptrain.checkpoint.unchanged import check_state, check_unchanged, fill, read_start
from rptrain.checkpoint.unit_files import by_unit, elements, unit_file
from rptrain.checkpoint.unit_tensors import PARAM_HASH, header
from rptrain.models.spec import ModelSpec
from rptrain.models.weights.safetensors_io import as_bytes


class UnitReader:
    """Reads the trainable units of a checkpoint, whose content is `state`. Thread-safe."""

    def __init__(self, checkpoint: Path, state: Mapping[str, Any], spec: ModelSpec) -> None:
        self._checkpoint, self._units, self._spec = checkpoint, state["units"], spec
        self._files = read_manifest(checkpoint)["files"]
        self._names = by_unit(state["units"])

    def read(self, index: int, flat: Tensor) -> None:
        """Fills the flat buffer of a unit's parameters, in the run's dtype. Damaged if a file is not as it was saved.

        Of a file from an earlier version, all is hashed, as it has no hash of the parameters alone.
        """
        unit = self._spec.units[index]
        for name, part in elements(self._checkpoint, self._names[unit_file(index, unit.name)], unit.numel).items():
            file, entry = self._checkpoint / name, self._files[name]
            buffers = memoryview(bytearray(len(header(self._units[name])))), as_bytes(flat[part])
            if PARAM_HASH in entry:
                read_start(file, entry, PARAM_HASH, buffers)
            else:
                state = check_unchanged(file, entry)
                fill(file, buffers)
                check_state(file, state)
