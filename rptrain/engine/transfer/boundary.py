"""Host buffers for activations between stages: one for each boundary and micro-batch of a round."""

from collections.abc import Hashable

import torch
from torch import Tensor

from rptrain.engine.store import Arena, aligned
from rptrain.schedule.lower import Access, Boundaries


class BoundaryBuffers:
    """[T, D] tensors in host memory, and the numbers under which their accesses appear on the board.

    A pass is one round of one iteration, counted from 0 over the run. The accesses of a buffer form one chain over
    all passes; access k waits for access k - 1, of any thread. Boundary 0 has two sets, used in turn: the host
    writes the embedding of the next pass while the gradient of this one still arrives.
    """

    def __init__(
        self, bounds: Boundaries, round_size: int, tokens: int, hidden: int, dtype: torch.dtype, *, lock: bool
    ) -> None:
        self.chain = bounds.chain
        self._round_size = round_size
        self._arena = Arena(self.nbytes(len(bounds.chain), round_size, tokens, hidden, dtype))
        self._buffers = {
            (boundary, parity, m): self._arena.take(tokens * hidden, dtype).view(tokens, hidden)
            for boundary in bounds.chain
            for parity in range(2 if boundary == 0 else 1)
            for m in range(round_size)
        }
        if lock:
            self._arena.lock()

    @staticmethod
    def nbytes(boundaries: int, round_size: int, tokens: int, hidden: int, dtype: torch.dtype) -> int:
        return (boundaries + 1) * round_size * aligned(tokens * hidden * dtype.itemsize)

    def locate(self, access: Access, pass_index: int, micro_batch: int) -> tuple[Tensor, Hashable, int]:
        """The buffer, its key on the board, and the number of this access in its chain."""
        boundary, place = access.boundary, micro_batch % self._round_size
        turn, parity = divmod(pass_index, 2) if boundary == 0 else (pass_index, 0)
        number = turn * self.chain[boundary] + access.order
        return self._buffers[boundary, parity, place], ("boundary", boundary, parity, place), number

    @property
    def locked(self) -> bool:
        return self._arena.locked

    def close(self) -> None:
        """Frees the memory; an engine may be kept for longer than it is used."""
        self._arena.close()
        self._buffers.clear()
