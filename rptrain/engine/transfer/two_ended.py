"""A buffer whose two ends are used in turn, each by a stage."""

from torch import Tensor

ALIGNMENT = 512  # bytes; a stage's parameters and gradient accumulators take a multiple of it


class TwoEnded:
    """A flat buffer. A stage takes a part at one end, and the next stage a part at the other end."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._aligned = buffer, ALIGNMENT // buffer.itemsize

    def range(self, end: int, size: int) -> tuple[int, int]:
        """The place of `size` elements at an end, 0 or 1: start and stop."""
        if end == 0:
            return 0, size
        start = len(self._buffer) - self._whole(size)
        return start, start + size

    def part(self, end: int, size: int) -> Tensor:
        """`size` elements at an end."""
        start, stop = self.range(end, size)
        return self._buffer[start:stop]

    def rest(self, end: int, size: int) -> Tensor:
        """What is left beside `size` elements at an end."""
        whole = self._whole(size)
        return self._buffer[whole:] if end == 0 else self._buffer[: len(self._buffer) - whole]

    def fit(self, size: int, other: int) -> bool:
        """Whether `size` elements at one end and `other` ones at the other end do not overlap."""
        return self._whole(size) + self._whole(other) <= len(self._buffer)

    def _whole(self, size: int) -> int:
        return -(-size // self._aligned) * self._aligned
