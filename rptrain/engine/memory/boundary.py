"""Host buffers for activations between stages: one for each boundary and micro-batch of a round, in each group."""

from collections.abc import Hashable

from torch import Tensor

from rptrain.engine.board import Board
from rptrain.engine.memory.arena import Arena, aligned
from rptrain.engine.memory.page_locking import Locking
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.schedule.lower import Access, Boundaries
from rptrain.schedule.plan import Plan


class BoundaryBuffers:
    """[T, D] tensors in host memory, and the numbers under which their accesses appear on the board.

    A pass is one round of a group, counted from 0 over all iterations. The accesses of a buffer form one chain over
    all passes; access k waits for access k - 1, of any thread. Boundary 0 has two sets, used in turn: the host
    writes the embedding of the next pass while the gradient of this one still arrives.
    """

    def __init__(self, bounds: Boundaries, plan: Plan, layout: StepLayout, hidden: int) -> None:
        self.chain, self._plan, tokens = bounds.chain, plan, layout.tokens
        self._arena = Arena(self.nbytes(len(bounds.chain), layout, hidden))
        self._buffers = {
            (group, boundary, parity, place): self._arena.take(tokens * hidden, layout.dtype).view(tokens, hidden)
            for group in range(plan.replicas)
            for boundary in bounds.chain
            for parity in range(2 if boundary == 0 else 1)
            for place in range(plan.round_size)
        }

    @staticmethod
    def nbytes(boundaries: int, layout: StepLayout, hidden: int) -> int:
        """Bytes for the micro-batches of a round, of all groups together."""
        return (boundaries + 1) * layout.at_once * aligned(layout.tokens * hidden * layout.dtype.itemsize)

    def locate(self, access: Access, iteration: int, micro_batch: int) -> tuple[Tensor, Hashable, int]:
        """The buffer, its key on the board, and the number of this access in its chain."""
        boundary, place = access.boundary, micro_batch % self._plan.round_size
        group, index = self._plan.group_pass(iteration, micro_batch)
        uses, parity = divmod(index, 2) if boundary == 0 else (index, 0)
        where = group, boundary, parity, place
        return self._buffers[where], ("boundary", *where), uses * self.chain[boundary] + access.order

    def lock(self) -> None:
        """Page-locks what is not locked yet (Arena.lock); before an engine uses it."""
        self._arena.lock()

    def skip(self, board: Board, iteration: int, micro_batch: int) -> None:
        """Leaves out all accesses of a micro-batch that the iteration does not have."""
        for boundary, accesses in self.chain.items():
            for order in range(accesses):
                _, key, number = self.locate(Access(boundary, order), iteration, micro_batch)
                board.skip(key, number)

    @property
    def locking(self) -> Locking:
        return self._arena.locking

    def close(self) -> None:
        """Frees the memory; an engine may be kept for longer than it is used."""
        self._arena.close()
        self._buffers.clear()
