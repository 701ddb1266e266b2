"""File-backed weights: frozen units that stay in byte ranges of the model's files.

Ranges are read by position and not memory-mapped, so that a truncated file is an error with the file's name. In both
cases the data stays in the page cache as long as there is memory.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from rptrain.kernels.quant import MXFP4, Quantized, finite
from rptrain.models.params import Param, Unit
from rptrain.models.spec import ModelShape
from rptrain.models.weights import mxfp4
from rptrain.models.weights.pretrained import WeightFiles
from rptrain.models.weights.safetensors_io import PIECE, Hashing, Stored, as_bytes
from rptrain.utils.errors import UserError
from rptrain.utils.file_ranges import OpenFile, Stamp

BLOCK = 1 << 20  # bytes per read of a hashing thread; divides PIECE
IN_MEMORY = 'use model.hold = "memory"'


@dataclass(frozen=True)
class FileRange:
    """A stored tensor that belongs to a unit's flat buffer, `start` bytes from its beginning."""

    name: str
    stored: Stored
    start: int
    checked: bool  # whether its values can be checked for NaN and infinity; not so for 4-bit codes

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def file_backed_units(spec: ModelShape) -> tuple[int, ...]:
    """The frozen units that can stay in files: all except the embedding, whose rows the host gathers, and the small
    units with parameters of a type of their own, which are often stored in another one.
    """
    return tuple(
        index for index in spec.frozen if index and all(param.dtype is None for param in spec.units[index].params)
    )


def pieces(files: WeightFiles, spec: ModelShape, dtype: torch.dtype) -> dict[int, list[FileRange]]:
    """The ranges of each file-backed unit, in order.

    Raises UserError if a tensor is stored in a format that would have to be converted, or if no unit is file-backed.
    """
    problems: list[str] = []
    found = {
        index: sorted(_pieces(files, spec.units[index], dtype, problems), key=lambda piece: piece.start)
        for index in file_backed_units(spec)
    }
    if problems:
        shown = problems[:3] + ([f"and {len(problems) - 3} more"] if len(problems) > 3 else [])
        raise UserError(
            f'model.hold = "map" reads tensors of {files.directory} in the format they are stored in, but '
            "these are stored in another format:\n- "
            + "\n- ".join(shown)
            + f"\nTo convert them while they are loaded, {IN_MEMORY}"
        )
    if not found:
        raise UserError(f"model.hold: there are no frozen weights that could be read from the files: {IN_MEMORY}")
    return found


def _pieces(files: WeightFiles, unit: Unit, dtype: torch.dtype, problems: list[str]) -> Iterator[FileRange]:
    start = 0
    for param in unit.params:
        row = 0
        for part in param.parts:
            numel = part.rows * prod(param.shape[1:])
            stored = files.tensors.get(part.key)
            if stored is None and param.format is MXFP4:
                yield from _in_4_bits(files, param, part.key, start, row, numel)
            elif stored is None:
                problems.append(f'{part.key} is stored in MXFP4, which only lora.base = "mxfp4" (LoRA) leaves as it is')
            elif param.format is not None:
                problems.append(f"{part.key} is stored as {_name(stored.dtype)}, to be held in {param.format.name}")
            elif stored.dtype != dtype:
                problems.append(f"{part.key} is stored as {_name(stored.dtype)}, and model.dtype is {_name(dtype)}")
            else:
                yield FileRange(part.key, stored, start + row * stored.dtype.itemsize, True)
            row += numel
        start += param.nbytes(dtype.itemsize)


def _in_4_bits(files: WeightFiles, param: Param, key: str, start: int, first: int, numel: int) -> Iterator[FileRange]:
    assert param.format is not None
    buffer = torch.empty(param.format.nbytes(param.numel), dtype=torch.uint8, device="meta")
    part = Quantized.of(buffer, param.numel, param.format).part(first, first + numel)
    places = (int(part.codes.storage_offset()), int(part.scales.storage_offset()))  # in bytes, as both are
    for name, stored, at, checked in zip(
        mxfp4.names(key), mxfp4.of(key, files.tensors), places, (False, True), strict=True
    ):
        yield FileRange(name, stored, start + at, checked)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FileBackedUnit:
    """A unit's flat buffer in files. Thread-safe."""

    def __init__(
        self,
        unit: Unit,
        dtype: torch.dtype,
        pieces: Sequence[FileRange],
        files: Mapping[Path, OpenFile],
        stamps: Mapping[Path, Stamp],
    ) -> None:
        self.unit, self.nbytes = unit, unit.nbytes(dtype.itemsize)
        self._dtype, self._pieces, self._files, self._stamps = dtype, pieces, files, stamps
        self._starts = [piece.start for piece in pieces]

    def read(self, start: int, buffer: memoryview) -> None:
        """Fills a byte buffer from the unit's flat buffer, starting at byte `start`; padding is zero.

        Raises UserError, with the file's name, if a file was truncated or changed.
        """
        at, stop = start, start + len(buffer)
        used: set[Path] = set()
        for piece in self._pieces[bisect_right(self._starts, start) - 1 :]:
            if piece.start >= stop:
                break
            begin, end = max(piece.start, at), min(piece.stop, stop)
            if begin < end:
                buffer[at - start : begin - start] = bytes(begin - at)
                target = buffer[begin - start : end - start]
                self._files[piece.stored.file].read(piece.stored.offset + begin - piece.start, target)
                used.add(piece.stored.file)
                at = end
        buffer[at - start :] = bytes(stop - at)
        for path in used:
            self._files[path].check(self._stamps[path])

    def stored(self, name: str) -> Tensor | Quantized:
        """A copy of a parameter in its stored form."""
        start, param = self._place(name)
        flat = torch.empty(param.nbytes(self._dtype.itemsize), dtype=torch.uint8)
        self.read(start, as_bytes(flat))
        plain, quantized = replace(self.unit, params=(param,)).stored_views(flat, self._dtype)
        return {**plain, **quantized}[name]

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """A copy of some rows of a parameter that is not quantized."""
        start, param = self._place(name)
        assert param.format is None
        rows = torch.empty(stop - first, *param.shape[1:], dtype=self._dtype)
        self.read(start + first * prod(param.shape[1:]) * rows.itemsize, as_bytes(rows))
        return rows

    def _place(self, name: str) -> tuple[int, Param]:
        """The first byte of a parameter."""
        start = 0
        for param in self.unit.params:
            if param.name == name:
                return start, param
            start += param.nbytes(self._dtype.itemsize)
        raise KeyError(name)

    def digest(self, hashing: Hashing | None = None) -> str:
        """SHA-256 of the flat buffer. `hashing` takes those of the tensors that it wants. Raises UserError for NaN or
        infinite values.
        """
        found, at = sha256(), 0
        buffer = torch.empty(min(BLOCK, self.nbytes), dtype=torch.uint8)
        for piece in self._pieces:
            found.update(bytes(piece.start - at))
            wanted = hashing if hashing is not None and hashing.wants(piece.stored) else None
            of_piece = sha256()
            for start in range(piece.start, piece.stop, BLOCK):
                part = buffer[: min(BLOCK, piece.stop - start)]
                self.read(start, as_bytes(part))
                found.update(as_bytes(part))
                stop = start + len(part)
                if wanted is not None:
                    of_piece.update(as_bytes(part))
                    if stop == piece.stop or (stop - piece.start) % PIECE == 0:
                        wanted.add(piece.stored, (start - piece.start) // PIECE, of_piece.digest())
                        of_piece = sha256()
                if piece.checked and not finite(part.view(piece.stored.dtype)):
                    raise UserError(
                        f"{piece.stored.file}: {piece.name} holds values that are infinite or not numbers: fetch the "
                        "weights again"
                    )
            at = piece.stop
        found.update(bytes(self.nbytes - at))
        return found.hexdigest()


class FileBackedWeights:
    """The file-backed units of a model, by index, over their open files. Context manager.

    Raises UserError as `pieces` does, or if a file has changed since its header was read.
    """

    def __init__(self, files: WeightFiles, spec: ModelShape, dtype: torch.dtype) -> None:
        found = pieces(files, spec, dtype)
        with ExitStack() as stack:
            opened: dict[Path, OpenFile] = {}
            for path in {piece.stored.file for of_unit in found.values() for piece in of_unit}:
                opened[path] = stack.enter_context(OpenFile(path))
                opened[path].check(files.stamps[path])
            self._opened = stack.pop_all()
        self.units = {
            index: FileBackedUnit(spec.units[index], dtype, of_unit, opened, files.stamps)
            for index, of_unit in found.items()
        }

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
