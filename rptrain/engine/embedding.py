"""The embedding as a host layer: the thread that gathers its rows, and the sums of its gradient rows.

It spares each device the upload of the whole table, a float32 gradient slot for it, and atomics. Gradient rows are
summed micro-batch by micro-batch in token order, so sums do not depend on the number of devices.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.iteration import Iteration
from rptrain.engine.memory import UnitState, accumulate_dtype
from rptrain.models.spec import ModelShape
from rptrain.plan.lower import Access


class RowGradients:
    """Gradient rows of the embedding table, summed over an iteration's micro-batches and applied once.

    Each thread of `pool` takes some columns, so sums do not depend on how many there are.
    """

    def __init__(self, state: UnitState, *, tied: bool, pool: Executor, threads: int) -> None:
        self._state, self._tied, self._pool = state, tied, pool
        self._table = state.unit.views(state.grad)["embed"]
        width = -(-self._table.shape[1] // threads)
        self._columns = [slice(start, start + width) for start in range(0, self._table.shape[1], width)]
        if not tied:
            self._table.zero_()
        self._touched: Tensor | None = None  # rows that the last iteration wrote (untied only)
        self._parts: list[tuple[Tensor, Tensor]] = []  # rows and sums of each round

    @staticmethod
    def nbytes(spec: ModelShape, dtype: torch.dtype, tokens: int, round_size: int, rounds: int) -> int:
        """The most that the sums take: a row for each token that differs, each round; and temporaries of a write."""
        rows = min(tokens * round_size, spec.vocab_size)
        wide = accumulate_dtype(dtype).itemsize
        return rows * spec.hidden_size * (rounds * wide + 2 * wide)

    def begin_round(self, input_ids: Tensor) -> None:
        """A round with tokens [M_R, T] begins to arrive."""
        rows = torch.unique(input_ids)
        wide = accumulate_dtype(self._state.params[0].dtype)
        self._parts.append((rows, torch.zeros(len(rows), self._table.shape[1], dtype=wide)))

    def add(self, input_ids: Tensor, gradient: Tensor) -> None:
        """The next micro-batch of the round: ids [T] and the gradient [T, D] of their embeddings."""
        rows, sums = self._parts[-1]
        order = torch.argsort(input_ids, stable=True)
        present, counts = torch.unique_consecutive(input_ids[order], return_counts=True)
        place = torch.searchsorted(rows, present)

        def part(columns: slice) -> None:
            block = sums[:, columns]
            sorted_rows = gradient[:, columns][order].to(sums.dtype)
            block[place] += torch.segment_reduce(sorted_rows, "sum", lengths=counts)

        self._run(part)

    def apply(self) -> None:
        """Writes the sums into the unit's gradient: on top of the head's if tied, else rows of a zero table."""
        before = None if self._tied else self._touched

        def part(columns: slice) -> None:
            block = self._table[:, columns]
            if before is not None:
                block[before] = 0
            for rows, sums in self._parts:
                block[rows] = (block[rows].to(sums.dtype) + sums[:, columns]).to(block.dtype)

        self._run(part)
        if not self._tied:
            self._touched = torch.unique(torch.cat([rows for rows, _ in self._parts]))
        self._parts.clear()

    def _run(self, part: Callable[[slice], None]) -> None:
        list(self._pool.map(part, self._columns))  # raises what a part raised


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
