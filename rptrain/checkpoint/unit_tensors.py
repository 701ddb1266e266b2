"""The tensors of a trainable unit in a checkpoint, and the layout of the files that hold them, each a part."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rptrain.checkpoint.atomic_dir import HASHED
from rptrain.engine.memory.moments import kind_of, layout
from rptrain.engine.memory.unit_state import UnitState
from rptrain.models.weights.safetensors_io import as_bytes

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
WEIGHTS = ("param", "previous")  # the first tensors of a file; each process holds all of their entries
# In the manifest entry of a file: the hash of its start, up to the end of the parameters, or of all WEIGHTS. The second
# is there for a file that has a part of a unit.
PARAM_HASH, START_HASH = "param_sha256", "start_sha256"

Layout = Mapping[str, Mapping[str, Any]]  # the safetensors header: dtype, shape and offsets of each tensor


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor of a unit. `tensor` has the entries that this process holds, of which `first` is the first."""

    tensor: Tensor
    first: int = 0
    elements: int | None = 1  # of the unit per entry; None: all entries are saved with element 0

    def entries(self, part: slice) -> slice:
        """The entries that are saved with these elements of the unit."""
        if self.elements is None:
            return slice(len(self.tensor) if part.start else 0, len(self.tensor))
        return slice(part.start // self.elements, part.stop // self.elements)

    def own(self, part: slice) -> tuple[int, Tensor, int]:
        """Of these entries, those that this process holds, between the numbers of entries before and after them."""
        wanted = self.entries(part)
        at, count = wanted.start - self.first, wanted.stop - wanted.start
        tensor = self.tensor[max(at, 0) : max(at + count, 0)]
        before = min(max(-at, 0), count)
        return before, tensor, count - before - len(tensor)


def saved_tensors(state: UnitState) -> dict[str, SavedTensor]:
    """The tensors of a unit, in the file's order: W_T, W_{T-1} (equal after a skipped step), optimizer state."""
    first = state.own.start
    tensors = {"param": SavedTensor(state.params[state.newest])}
    if state.generations == 2 and state.wire:
        tensors["previous"] = SavedTensor(state.wire[state.before], elements=None)
    elif state.generations == 2:
        tensors["previous"] = SavedTensor(state.params[state.before])
    if state.remainder is not None:
        tensors["remainder"] = SavedTensor(state.remainder, first)
    if state.masters is not None:
        tensors["masters"] = SavedTensor(state.masters, first)
    moments = state.moments
    for name, _, shared in layout(kind_of(moments["exp_avg"].dtype), moments["exp_avg"].dtype):
        tensors[name] = SavedTensor(moments[name], first // shared, shared)
    return tensors


@dataclass(frozen=True)
class Part:
    """A file with the saved tensors of consecutive elements of a unit. This process may hold only some entries."""

    file: str
    elements: slice
    tensors: Mapping[str, SavedTensor]

    @property
    def layout(self) -> Layout:
        entries = {name: each.entries(self.elements) for name, each in self.tensors.items()}
        counts = {name: each.stop - each.start for name, each in entries.items()}
        return file_layout({name: (each.tensor.dtype, counts[name]) for name, each in self.tensors.items()})

    @property
    def content(self) -> Sequence[memoryview]:
        """The memory of the entries that this process holds."""
        return [as_bytes(each.own(self.elements)[1]) for each in self.tensors.values()]

    def of(self, *names: str) -> "Part":
        """The part with these tensors only. The first ones are the start of the file."""
        return replace(self, tensors={name: each for name, each in self.tensors.items() if name in names})

    def end_of(self, *names: str) -> int:
        """Bytes of the file up to the end of these tensors, which are the first ones."""
        return len(header(self.layout)) + sum(map(len, self.of(*names).content))

    @property
    def has_state(self) -> bool:
        """Whether this process holds optimizer state of the part."""
        return any(len(each.own(self.elements)[1]) for name, each in self.tensors.items() if name not in WEIGHTS)

    def buffers(self, stored: Layout) -> Iterator[memoryview]:
        """Memory to read the file into, whose layout is `stored`. The rest of the file is read too, for its hash."""
        unused = memoryview(bytearray(HASHED))

        def skip(nbytes: int) -> Iterator[memoryview]:
            for start in range(0, nbytes, HASHED):
                yield unused[: nbytes - start]

        yield from skip(len(header(stored)))
        for each in self.tensors.values():
            before, tensor, after = each.own(self.elements)
            yield from skip(before * tensor.itemsize)
            yield as_bytes(tensor)
            yield from skip(after * tensor.itemsize)


def file_layout(tensors: Mapping[str, tuple[torch.dtype, int]]) -> Layout:
    """The layout of a file of flat tensors, with their dtypes and numbers of entries."""
    found, end = {}, 0
    for name, (dtype, count) in tensors.items():
        begin, end = end, end + count * dtype.itemsize
        found[name] = {"dtype": DTYPES[dtype], "shape": [count], "data_offsets": [begin, end]}
    return found


def header(layout: Layout) -> bytes:
    """The beginning of a file with this layout."""
    encoded = json.dumps(layout).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded
