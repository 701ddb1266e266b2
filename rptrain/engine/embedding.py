"""The embedding as a layer on the host: a thread that gathers rows. Devices do not need the whole table."""

import queue
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.iteration import Iteration
from rptrain.schedule.lower import Access
from rptrain.utils.parallel import cores

GATHERERS = 8  # threads that gather rows, at most: with more than there are cores, later parts delay the first ones
PARTS = 4  # of a micro-batch: each takes the interpreter lock a few times, and two micro-batches fill the threads


class EmbeddingWorker:
    """The thread that gathers embedding rows into boundary 0, ahead of the first stage.

    It visits the micro-batches in order and submits each, in parts, to a pool as soon as its buffer is free. The last
    part to end publishes the micro-batch, so that several are gathered at once.

    Parts never read a table that is being overwritten: in sync and async, update n overwrites the version that
    iteration n reads, and waits for all gradient rows of iteration n, which devices compute from the published rows.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pool = ThreadPoolExecutor(min(GATHERERS, max(2, cores())), "embedding rows")
        self._outputs: dict[Hashable, Sequence[Tensor]] = {}  # the parts of each buffer, by its key on the board
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
        self._pool.shutdown()  # after the parts that were submitted, none of which waits for another thread

    def _main(self) -> None:
        context = self._context
        while (iteration := self._queue.get()) is not None:
            self._where = f"embedding of iteration {iteration.number}"
            parts = iteration.input_ids.tensor_split(PARTS, dim=1)
            ids = [*zip(*(part.unbind() for part in parts), strict=True)]  # of each micro-batch, before any is urgent
            generation = context.board.wait(("version", 0), context.read_version(iteration.number))
            table = context.store.units[0].views[generation]["embed"]
            for m in context.plan.arrivals(context.plan.concurrent):
                if m < iteration.micro_batches:
                    self._submit_parts(iteration.number, m, table, ids[m])

    def _submit_parts(self, iteration: int, m: int, table: Tensor, ids: Sequence[Tensor]) -> None:
        context = self._context
        out, key, number = context.buffers.locate(Access(0, 0), iteration, m)
        if number:
            context.board.wait(key, number - 1)  # the gradient was read by host code, which has finished
        if context.probe is not None:
            context.probe(f"embedding m{m}")
        if key not in self._outputs:
            self._outputs[key] = out.tensor_split(PARTS)
        left = deque(range(PARTS))

        def gather(ids: Tensor, out: Tensor) -> None:
            gather_rows(table, ids, out)
            if left.pop() == 0:
                context.board.publish(key, number)

        def where() -> str:
            return f"embedding of iteration {iteration}, micro-batch {m}"

        for part in zip(ids, self._outputs[key], strict=True):
            self._pool.submit(context.guard, where, partial(gather, *part))


def gather_rows(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """Copies rows [T, D] of the table to `out`."""
    torch.index_select(table, 0, ids, out=out)
