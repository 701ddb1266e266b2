"""Host memory of an exact size, cut into tensors that are page-locked for CUDA."""

import mmap
import weakref
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import Tensor

from rptrain.engine.memory.page_locking import Locking
from rptrain.utils import control_groups, numa
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import Phase, phase

ALIGNMENT = mmap.PAGESIZE  # bytes: every tensor of an arena is page-locked separately
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
RESERVE = 8  # after a refusal, one in this many locked bytes is unlocked: batches and the driver itself lock some too


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Host memory of an exact size, cut into tensors; interleaved over NUMA nodes, and page-locked for CUDA.

    The memory is mapped and then registered, because torch's pinned allocator rounds sizes up to powers of two. Each
    tensor is registered separately: a copy must not cross from one registration into another. Context manager.
    """

    def __init__(self, nbytes: int) -> None:
        self._size = max(aligned(nbytes), ALIGNMENT)
        self._map: mmap.mmap | None = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):  # the first: first touch and registration are faster
            with suppress(OSError):  # kernels without transparent huge pages refuse it
                self._map.madvise(advice)
        self._base = torch.frombuffer(self._map, dtype=torch.uint8)
        numa.topology().interleave(self._base.data_ptr(), self._size)  # every GPU and AdamW use all weights
        self._used = 0
        self._pieces: list[tuple[Tensor, bool]] = []  # bytes in use, in whole pages, and whether GPUs copy them
        self._registered: dict[int, int] = {}  # bytes by address, in the order in which they were locked
        # Memory that is unmapped while registered poisons later registrations of its addresses.
        self._unregister = weakref.finalize(self, _unregister, self._registered)

    def take(self, numel: int, dtype: torch.dtype, *, copied: bool = True) -> Tensor:
        """Returns the next `numel` elements, zero-filled, on pages of their own. `copied`: whether GPUs copy them."""
        nbytes = numel * dtype.itemsize
        assert self._used + nbytes <= self._size, (self._used, nbytes, self._size)
        piece = self._base[self._used : self._used + aligned(nbytes)]
        if nbytes:  # CUDA registers no empty memory
            self._pieces.append((piece, copied))
        self._used += aligned(nbytes)
        return piece[:nbytes].view(dtype)

    def lock(self) -> None:
        """Page-locks all tensors taken so far, before anything is written to them: first those that GPUs copy.

        If the system refuses some of these, the others stay locked, less a RESERVE. If it refuses one that only the CPU
        uses, all of that kind stay pageable, which leaves the room to others.
        """
        with phase("page-locking host memory", sum(len(piece) for piece, _ in self._pieces)) as locking:
            if not self._register([piece for piece, copied in self._pieces if copied], locking):
                self.unlock(self._locked // RESERVE)
                return
            before = self._locked
            if not self._register([piece for piece, copied in self._pieces if not copied], locking):
                self.unlock(self._locked - before)

    def unlock(self, nbytes: int) -> int:
        """Unlocks tensors, the last locked first, until these are `nbytes` or all. Returns how many bytes they are."""
        return _unregister(self._registered, nbytes)

    @property
    def locking(self) -> Locking:
        """What is page-locked of the tensors that GPUs copy."""
        copied = [range(piece.data_ptr(), piece.data_ptr() + len(piece)) for piece, copied in self._pieces if copied]
        return Locking(sum(map(len, copied)), tuple(one for one in copied if one.start not in self._registered))

    @property
    def _locked(self) -> int:
        return sum(self._registered.values())

    def _register(self, pieces: list[Tensor], locking: Phase) -> bool:
        """Registers tensors that are not yet. Returns whether all are.

        After a refusal, only smaller ones are tried. A refusal leaves an error in CUDA's runtime that the next kernel
        launch of the same thread would report as its own; the threads of `in_parallel` end before that.
        """
        cudart, refused = _cudart(), self._size + 1  # bytes of the smallest that was refused

        def register(piece: Tensor) -> None:
            nonlocal refused
            address, nbytes = piece.data_ptr(), len(piece)
            if nbytes >= refused or address in self._registered:
                return
            # A thread clears pages at a few GB/s, by a write to each as within the call that registers them. Behind the
            # writes that call is short; others write meanwhile.
            piece[::ALIGNMENT].zero_()
            if int(cudart.cudaHostRegister(address, nbytes, PORTABLE)) == 0:
                self._registered[address] = nbytes
            else:
                refused = min(refused, nbytes)

        in_parallel(register, sorted(pieces, key=len, reverse=True), done=lambda piece: locking.add(len(piece)))
        return refused > self._size

    def close(self) -> None:
        """Unlocks the memory. It is unmapped when its last tensor is deleted, and never before it is unlocked."""
        with phase("unlocking host memory", unit=""):
            self._unregister()
        self._pieces.clear()
        self._base, self._map = self._base.new_empty(0), None

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _unregister(registered: dict[int, int], nbytes: float = inf) -> int:
    done = 0
    while registered and done < nbytes:
        address, size = registered.popitem()
        _cudart().cudaHostUnregister(address)
        done += size
    return done


def available_bytes() -> int:
    """Host memory that this process may still allocate: free memory, or the least that a control group has left."""
    return min([psutil.virtual_memory().available, *control_groups.memory_left()])
