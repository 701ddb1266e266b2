"""The safetensors format: headers checked without loading, tensors read in pieces, files written tensor by tensor.

A file is 8 bytes of header length (little endian), a JSON header with each tensor's dtype, shape and byte
range, and the bytes themselves, without gaps.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rptrain.utils.errors import UserError, describe
from rptrain.utils.file_ranges import OpenFile
from rptrain.utils.files import naming, open_regular
from rptrain.utils.liveness import progressed
from rptrain.utils.objects import unique_keys
from rptrain.utils.parallel import in_parallel

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes, the format's own limit
INSTEAD = {
    b"version": "what git keeps in place of a file that it has not fetched",
    b"<": "a web page",
}  # beginnings of other file formats
PIECE = 1 << 23  # bytes read at a time, so that all threads have work; digests depend on it
CONVERTED = 1 << 20  # bytes converted or hashed at a time: they stay in a core's cache


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, at byte `offset`."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Hashing(Protocol):
    """Takes the hashes of tensors while they are read: see `TensorDigests` in digests.py."""

    def wants(self, stored: Stored) -> bool: ...

    def add(self, stored: Stored, number: int, digest: bytes) -> None: ...


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a file by name. Raises UserError if the file is truncated or not a safetensors file."""
    try:
        actual = file.stat().st_size
        with open_regular(file) as stream:
            begin = stream.read(8)
            length = int.from_bytes(begin, "little")
            if actual < 8 or length > MAX_HEADER:
                raise UserError(f"{file} is not a safetensors file{_instead(begin)}")
            if 8 + length > actual:
                raise UserError(_cut_short(file, 8 + length, actual, "at least "))
            encoded = stream.read(length)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    stored, end = {}, 0
    for begin, stop, name, kind, shape in _entries(file, encoded):
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise _unreadable(file, name, kind)
        if begin != end or stop - begin != prod(shape) * dtype.itemsize:
            raise UserError(f"{file}: the byte range of {name} does not fit its shape; the file is damaged")
        stored[name], end = Stored(file, 8 + length + begin, dtype, shape), stop
    if 8 + length + end > actual:
        raise UserError(_cut_short(file, 8 + length + end, actual))
    if 8 + length + end < actual:
        raise UserError(f"{file} is damaged: {8 + length + end} bytes expected, {actual} there")
    return stored


def check_floats(tensors: Mapping[str, Stored]) -> None:
    """Raises UserError if one of these tensors holds integers or quantized numbers."""
    for name, stored in tensors.items():
        if stored.dtype not in FLOATS.values():
            raise _unreadable(stored.file, name, NAMES[stored.dtype])


def read_here(stored: Stored, tensor: Tensor) -> None:
    """Reads one tensor of the same dtype in the calling thread."""
    assert (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype)
    with OpenFile(stored.file) as file:
        file.read(stored.offset, as_bytes(tensor))


def read_one(stored: Stored) -> Tensor:
    """Reads one tensor in the calling thread. Files are not mapped: some file systems refuse that."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    read_here(stored, tensor)
    return tensor


class _Piece(NamedTuple):
    """Piece number `number` of a stored tensor, and its place in memory."""

    file: OpenFile
    stored: Stored
    number: int
    target: Tensor
    hashing: Hashing | None


def read(tensors: Iterable[tuple[Stored, Tensor]], hashing: Hashing | None = None) -> None:
    """Fills contiguous tensors with stored ones of the same shapes, converted to their dtypes. `hashing` takes the
    SHA-256 of each piece of the tensors that it wants.

    Uses all cores and reads directly into the tensors; to convert, each core needs CONVERTED bytes. Raises UserError,
    with the file's name, if a file was deleted or truncated since its header was read.
    """
    with ExitStack() as stack:
        files: dict[Path, OpenFile] = {}
        pieces: list[_Piece] = []
        for stored, tensor in tensors:
            assert stored.shape == tensor.shape
            if stored.file not in files:
                files[stored.file] = stack.enter_context(OpenFile(stored.file))
            wanted = hashing if hashing is not None and hashing.wants(stored) else None
            for number, piece in enumerate(tensor.view(-1).split(PIECE // stored.dtype.itemsize)):
                pieces.append(_Piece(files[stored.file], stored, number, piece, wanted))
        in_parallel(_read_piece, pieces)


def _read_piece(piece: _Piece) -> None:
    file, stored, number, target, hashing = piece
    offset, dtype = stored.offset + number * PIECE, stored.dtype
    digest = sha256() if hashing is not None else None
    if dtype == target.dtype:
        file.read(offset, as_bytes(target))  # at once, so that a disk has enough to do
        if digest is not None:
            digest.update(as_bytes(target))
    else:
        buffer = torch.empty(CONVERTED // dtype.itemsize, dtype=dtype)
        for index, part in enumerate(target.split(len(buffer))):
            here = buffer[: len(part)]
            file.read(offset + index * CONVERTED, as_bytes(here))
            if digest is not None:
                digest.update(as_bytes(here))
            part.copy_(here)
    if hashing is not None and digest is not None:
        hashing.add(stored, number, digest.digest())


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def write(
    file: Path,
    entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[Tensor],
    wrote: Callable[[int], object] | None = None,
) -> None:
    """Writes tensors with these names, shapes and types, to which they are converted, in this order, and syncs. `wrote`
    is called with the bytes of each tensor.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in entries.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with naming(file), file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for (shape, dtype), tensor in zip(entries.values(), tensors, strict=True):
            assert tensor.shape == shape
            progressed()
            nbytes = stream.write(as_bytes(tensor.detach().to(device="cpu", dtype=dtype).contiguous()))
            if wrote is not None:
                wrote(nbytes)
        stream.flush()
        os.fsync(stream.fileno())


def _entries(file: Path, encoded: bytes) -> list[tuple[int, int, str, str, tuple[int, ...]]]:
    """Start, end, name, dtype and shape of each tensor, in the order of their bytes."""
    entries = []
    try:
        for name, entry in json.loads(encoded, object_pairs_hook=unique_keys).items():
            if name != "__metadata__":
                begin, stop = entry["data_offsets"]
                kind, shape = entry["dtype"], tuple(entry["shape"])
                if not isinstance(kind, str) or any(type(number) is not int for number in (begin, stop, *shape)):
                    raise ValueError(f"the entry of {name!r} has a value of a wrong type")
                entries.append((begin, stop, name, kind, shape))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = describe(error, with_type=not isinstance(error, ValueError))
        raise UserError(f"{file} is not a safetensors file: its header is malformed: {reason}") from error
    return sorted(entries)


def _unreadable(file: Path, name: str, kind: str) -> UserError:
    copy = ", or a copy in 16 bits (docs/guide/models.md, Weights in FP8)" if kind.startswith("F8_") else ""
    return UserError(
        f"{file}: {name} is stored as {kind}; {', '.join(FLOATS)} can be read, so use the model's unquantized weights"
        f"{copy}"
    )


def _instead(begin: bytes) -> str:
    """Advice for a file with this beginning that has no tensors."""
    if not begin:
        return ": it is empty; fetch it again"
    known = [what for start, what in INSTEAD.items() if begin.lstrip().startswith(start)]
    return f" but {known[0]}; fetch it again (git lfs pull)" if known else ""


def _cut_short(file: Path, expected: int, actual: int, about: str = "") -> str:
    return f"{file} is cut short: {about}{expected} bytes expected, {actual} there; fetch it again"
