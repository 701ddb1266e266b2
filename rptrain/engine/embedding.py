"""The embedding as a host layer: the thread that gathers its rows, and the sums of its gradient rows.

It spares each device the upload of the whole table, a float32 gradient slot for it, and atomics. Gradient rows are
summed micro-batch by micro-batch in token order, so sums do not depend on the number of devices.
"""

import queue
import threading

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.iteration import Iteration
from rptrain.engine.memory import UnitState, accumulate_dtype
from rptrain.plan.lower import Access


class RowGradients:
    """Gradient rows of the embedding table, summed over micro-batches and applied once an iteration."""

    def __init__(self, state: UnitState, *, tied: bool) -> None:
        self._state, self._tied = state, tied
        self._touched: Tensor | None = None  # rows that the last iteration wrote (untied only)
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, input_ids: Tensor, gradients: list[Tensor]) -> None:
        """A round's micro-batches: ids [M_R, T] and the gradients [T, D] of their embedding outputs."""
        wide = accumulate_dtype(gradients[0].dtype)
        rows = torch.unique(input_ids)
        sums = torch.zeros(len(rows), gradients[0].shape[1], dtype=wide)
        for ids, gradient in zip(input_ids, gradients, strict=True):
            order = torch.argsort(ids, stable=True)
            present, counts = torch.unique_consecutive(ids[order], return_counts=True)
            partial = torch.segment_reduce(gradient[order].to(wide), "sum", lengths=counts)
            place = torch.searchsorted(rows, present)
            sums[place] = sums[place] + partial
        self._parts.append((rows, sums))

    def apply(self) -> None:
        """Writes the sums into the unit's gradient: on top of the head's if tied, else rows of a zero table."""
        table = self._state.unit.views(self._state.grad)["embed"]
        if not self._tied:
            if self._touched is not None:
                table[self._touched] = 0
            self._touched = torch.unique(torch.cat([rows for rows, _ in self._parts]))
        for rows, sums in self._parts:
            table[rows] = (table[rows].to(sums.dtype) + sums).to(table.dtype)
        self._parts.clear()


class EmbeddingWorker:
    """The thread that gathers embedding rows into boundary 0, ahead of the first stage."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._where = "waiting"
        self._queue: queue.SimpleQueue[Iteration | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=context.guard, args=(lambda: self._where, self._main), name="embedding", daemon=True
        )
        self._thread.start()

    def submit(self, iteration: Iteration | None) -> None:
        self._queue.put(iteration)

    def join(self) -> None:
        self._thread.join()

    def _main(self) -> None:
        context = self._context
        while (iteration := self._queue.get()) is not None:
            self._where = f"embedding of iteration {iteration.number}"
            generation = context.board.wait(("version", 0), context.read_version(iteration.number))
            table = context.store.units[0].views[generation]["embed"]
            for m, ids in enumerate(iteration.input_ids):
                pass_index = iteration.number * context.plan.rounds + m // context.plan.round_size
                out, key, number = context.buffers.locate(Access(0, 0), pass_index, m)
                if number:
                    context.board.wait(key, number - 1)  # its gradient was read: host work, finished when published
                if context.probe is not None:
                    context.probe(f"embedding m{m}")
                torch.index_select(table, 0, ids, out=out)
                context.board.publish(key, number)
