"""The gradients of an iteration as they arrive from the devices, summed over the groups of replicas."""

import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.iteration import Iteration
from rptrain.engine.optim.adam import CpuAdam
from rptrain.engine.optim.embedding_grads import CpuRows
from rptrain.engine.optim.row_gradients import RowGradients
from rptrain.models.spec import ModelShape
from rptrain.schedule.lower import Access


class Gradients:
    """Sums an iteration's gradients. Its second thread sums those of the embedding, which arrive at the same time."""

    _early = True  # complete rows are applied while others still arrive

    def __init__(self, context: Context, adam: CpuAdam, tell: Callable[[str], None]) -> None:
        """`tell` gets what the thread that calls `square_sum` waits for."""
        self._context, self._adam, self._tell = context, adam, tell
        self._rows = self._row_gradients() if context.store.units[0].unit.trainable else None
        self._asked: queue.SimpleQueue[tuple[Iteration, threading.Event] | None] = queue.SimpleQueue()
        where = "receiving gradient: embedding"
        self._thread = threading.Thread(
            target=context.guard, args=(lambda: where, self._collect_rows), name="embedding gradients", daemon=True
        )
        self._thread.start()

    @property
    def _replicas(self) -> int:
        """Groups of all processes."""
        return self._context.plan.replicas

    def _row_gradients(self) -> RowGradients:
        store = self._context.store
        return RowGradients(store.units[0], store.spec, store.layout, CpuRows(self._adam.pool, self._adam.threads))

    def square_sum(self, iteration: Iteration) -> float:
        """Waits for each unit's gradient, in the order in which backward stages finish. Returns the sum of squares.

        The groups' gradients are added in a fixed order, whichever arrives first.
        """
        context, plan = self._context, self._context.plan
        last = (iteration.number + 1) * plan.turns - 1
        head = threading.Event()  # set once the head's gradient, if rows are added to it, has arrived
        if not context.store.spec.tied:
            head.set()
        self._asked.put((iteration, head))
        squares: dict[int, Tensor] = {}
        for unit in arrival_order(context.store.spec):
            self._tell(f"receiving gradient: {label(context.store.spec.units[unit].name)}")
            for group in range(plan.replicas):
                context.board.wait(("grad", unit, group), last).synchronize()
            squares[unit] = self._add(unit, context.store.units[unit].grads)
            if unit == 0:
                head.set()
        self._tell("receiving gradient: embedding")
        context.board.wait(("rows",), iteration.number)
        if self._rows is not None:
            self._rows.apply()
            state = context.store.units[0]
            squares[0] = self._adam.squares(state.grad[state.own])
        return self._total(squares)

    def _add(self, unit: int, grads: Sequence[Tensor]) -> Tensor:
        """Adds the groups' gradients of a unit into the first; returns the sum of squares of each chunk.

        The embedding's are not needed: rows are added before.
        """
        return self._adam.squares(*grads) if unit or len(grads) > 1 else torch.empty(0)

    def _total(self, squares: Mapping[int, Tensor]) -> float:
        return math.fsum(math.fsum(squares[unit].tolist()) for unit in sorted(squares))

    def share_losses(self, iteration: Iteration) -> None:
        """Completes `iteration.step_losses`, if other processes compute some of them."""
        iteration.step_losses.append(iteration.losses)

    def join(self) -> None:
        """Waits for the thread to end, and frees its memory."""
        self._asked.put(None)  # after the requests for all rows
        self._thread.join()
        if self._rows is not None:
            self._rows.close()

    def _collect_rows(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._collect_rows_of(*asked)

    def _collect_rows_of(self, iteration: Iteration, head: threading.Event) -> None:
        """Sums the gradients of the embedding's outputs as they arrive, last in a round.

        Complete sums are added to the table's gradient meanwhile. With a frozen embedding, it only waits for the
        rows: after them, the devices have finished the iteration.
        """
        context, plan = self._context, self._context.plan
        # the same on any number of devices
        order = [m for m in plan.arrivals(plan.replicas) if m < iteration.micro_batches]
        if self._rows is not None:
            groups = [m // plan.round_size % self._replicas for m in range(len(iteration.step_ids))]
            self._rows.begin(iteration.step_ids, [iteration.numbers[m] for m in order], groups)
        last = Access(0, context.bounds.chain[0] - 1)
        for m in order:
            gradient, key, number = context.buffers.locate(last, iteration.number, m)
            context.board.wait(key, number - 1).synchronize()
            if context.probe is not None:
                context.probe(f"gradient rows m{m}")
            if self._rows is not None:
                self._rows.add(iteration.numbers[m], gradient)
                if head.is_set() and self._early:
                    self._rows.apply()
            context.board.publish(key, number)
        context.board.publish(("rows",), iteration.number)


def arrival_order(spec: ModelShape) -> Sequence[int]:
    """The units whose gradients come from devices, in the order in which backward stages finish."""
    return spec.trained(unit for layer in reversed(spec.stack) for unit in layer.units)


def label(unit: str) -> str:
    """The name of a unit in messages."""
    return {"embed": "embedding", "norm": "final norm"}.get(unit, unit)
