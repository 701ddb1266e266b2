"""What is page-locked for CUDA and what is not, where the system locks less than a run asks for."""

from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Locking:
    """How much of the host memory that GPUs copy is page-locked. `+` adds that of other memory."""

    copied: int = 0  # bytes
    pageable: tuple[range, ...] = ()  # addresses of tensors among them that are not locked

    @property
    def missing(self) -> int:
        """Bytes that are not locked."""
        return sum(map(len, self.pageable))

    @property
    def locked(self) -> int:
        return self.copied - self.missing

    def __add__(self, other: "Locking") -> "Locking":
        return Locking(self.copied + other.copied, self.pageable + other.pageable)


class PageableRanges:
    """Ranges of addresses that do not overlap; `in` looks one up."""

    def __init__(self, ranges: Iterable[range]) -> None:
        self._ranges = sorted(ranges, key=lambda one: one.start)
        self._starts = [one.start for one in self._ranges]

    def __contains__(self, address: int) -> bool:
        index = bisect_right(self._starts, address)
        return index > 0 and address < self._ranges[index - 1].stop


def page_locked(tensor: Tensor) -> Tensor:
    """A page-locked copy of a tensor, or the tensor itself if the system locks no more memory."""
    try:
        return tensor.pin_memory()
    except RuntimeError:  # as for every error of CUDA; those of a device come again with its next operation
        _clear_error()
        return tensor


def _clear_error() -> None:
    """Clears the thread's last error in CUDA's runtime, which its next kernel launch would report as its own."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)
