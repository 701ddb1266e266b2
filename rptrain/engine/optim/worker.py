"""The optimizer's thread: it turns gradients into the next version of each unit.

The paper's five ordering constraints (section 4.3.1) hold without a barrier:
(1) a unit's weights are written only after the devices uploaded them: the thread waits for the gradient, which was
    computed from the last of those uploads; in async the next iteration, already running, reads the other generation;
(2) devices upload version v of a unit only once it was published here;
(3) a gradient is read only after the event of its last download;
(4) devices download into a unit's gradient only once the version made from the previous one was published;
(5) one thread, one step after the other.

What devices read of a wired unit is its wire, so "written" and "reads" mean the wire there: its spare generation is
written from the updated weights before the version is published. The weights themselves are updated in place, in async
too, because no device reads them; a snapshot does, and update n waits until it has released the unit.
"""

import math
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial

from rptrain.engine.context import Context
from rptrain.engine.devices.base import stamp
from rptrain.engine.embedding import RowGradients
from rptrain.engine.iteration import Iteration, StepRequest, StepResult
from rptrain.engine.optim import moments
from rptrain.engine.optim.adam import CpuAdam, UpdateArgs
from rptrain.engine.optim.loss_scale import LossScale
from rptrain.engine.snapshot import Snapshot
from rptrain.engine.store import UnitState
from rptrain.models.spec import Unit
from rptrain.schedule.lower import Access
from rptrain.utils.liveness import progressed
from rptrain.utils.native import ended


class OptimizerWorker:
    """Takes an iteration and its step in turn; publishes ("scale",), ("version", unit) and ("step",)."""

    def __init__(
        self,
        context: Context,
        adam: CpuAdam,
        *,
        weight_decay: float,
        max_grad_norm: float,
        seed: int,
        applied: int,
        loss_scale: LossScale,
    ) -> None:
        self._context, self._adam, self._seed = context, adam, seed
        self._weight_decay, self._max_grad_norm = weight_decay, max_grad_norm
        self.applied = applied  # steps that were not skipped, over the whole training run, for bias correction
        self.loss_scale = loss_scale  # loss scale of the weights after the last step
        for version, scale in ((-1, loss_scale.before), (0, loss_scale.scale)):
            context.board.publish(("scale",), version, scale)
        outputs, _, _ = context.buffers.locate(Access(0, 0), 0, 0)  # [T, D], the embeddings of a micro-batch
        embedding = context.store.units[0]
        self._rows: RowGradients | None = None
        if embedding.unit.trainable:
            self._rows = RowGradients(
                embedding,
                len(outputs) * context.plan.micro_batches,
                tied=context.store.spec.tied,
                pool=adam.pool,
                threads=adam.threads,
            )
        self._snapshot: Snapshot | None = None  # the snapshot that updates wait for
        self._snapshots = 0
        self._where = "waiting"
        self.seconds: float | None = None  # duration of the last update
        self._queue: queue.SimpleQueue[Iteration | StepRequest | None] = queue.SimpleQueue()
        self._rows_asked: queue.SimpleQueue[tuple[Iteration, threading.Event] | None] = queue.SimpleQueue()
        rows = "receiving gradient: embedding"
        self._thread = threading.Thread(
            target=context.guard, args=(lambda: self._where, self._main), name="optimizer", daemon=True
        )
        # a second thread, because rows arrive at the same time as gradients of units
        self._row_thread = threading.Thread(
            target=context.guard, args=(lambda: rows, self._collect_rows), name="embedding gradients", daemon=True
        )
        self._thread.start()
        self._row_thread.start()

    def submit(self, item: Iteration | StepRequest | None) -> None:
        """Submits an iteration, the step that follows it, or None to end the thread."""
        self._queue.put(item)

    @property
    def doing(self) -> str:
        return self._where

    def snapshot(self) -> Snapshot:
        """Starts a snapshot of the state after the last step. No step may be in progress, and no other snapshot."""
        assert self._snapshot is None or self._snapshot.released, "one snapshot at a time"
        order = self._update_order()
        self._snapshot = Snapshot(self._context.board, self._snapshots, order, self.applied, self.loss_scale)
        self._snapshots += 1
        return self._snapshot

    def join(self) -> None:
        """Waits for the thread to end, and frees its memory."""
        self._thread.join()
        self._rows_asked.put(None)  # after the requests for all rows
        self._row_thread.join()
        if self._rows is not None:
            self._rows.close()

    def _main(self) -> None:
        while isinstance(iteration := self._queue.get(), Iteration):
            square_sum = self._collect(iteration)
            request = self._queue.get()
            if not isinstance(request, StepRequest):
                return
            lag = bool(self._context.lag)
            scale = self.loss_scale.used(asynchronous=lag)
            norm = math.sqrt(square_sum) * iteration.rest / scale
            request.result = StepResult(norm, not math.isfinite(norm), scale)
            self.loss_scale = self.loss_scale.after(asynchronous=lag, skipped=request.result.skipped)
            self._context.board.publish(("scale",), iteration.number + 1, self.loss_scale.scale)
            recorder = self._context.recorder
            measured = recorder.meter is not None and not request.result.skipped
            if measured:
                self._wait_for_snapshot()  # not a part of the update's duration
            began = time.perf_counter()
            with recorder.timed(stamp, iteration.number, "update") if measured else nullcontext():
                self._update(iteration, request.learning_rate, request.result)
            self.seconds = time.perf_counter() - began
            self._snapshot = None
            self._context.board.publish(("step",), iteration.number)
            self._where = "waiting"

    def _collect(self, iteration: Iteration) -> float:
        """Waits for each unit's gradient, in the order in which backward stages finish. Returns the sum of squares.

        The groups' gradients are added in a fixed order, whichever arrives first.
        """
        context, plan = self._context, self._context.plan
        last = (iteration.number + 1) * plan.turns - 1
        head = threading.Event()  # set once the head's gradient, if rows are added to it, has arrived
        if not context.store.spec.tied:
            head.set()
        self._rows_asked.put((iteration, head))
        sums = {}
        for unit in self._arrival_order():
            self._where = f"receiving gradient: {_label(context.store.spec.units[unit].name)}"
            for group in range(plan.replicas):
                context.board.wait(("grad", unit, group), last).synchronize()
            grad, *others = context.store.units[unit].grads
            if unit or others:
                sums[unit] = self._adam.square_sum(grad, *others)
            if unit == 0:
                head.set()
        self._where = "receiving gradient: embedding"
        context.board.wait(("rows",), iteration.number)
        if self._rows is not None:
            self._rows.apply()
            sums[0] = self._adam.square_sum(context.store.units[0].grad)
        return math.fsum(sums[unit] for unit in sorted(sums))

    def _collect_rows(self) -> None:
        while (asked := self._rows_asked.get()) is not None:
            self._collect_rows_of(*asked)

    def _collect_rows_of(self, iteration: Iteration, head: threading.Event) -> None:
        """Sums the gradients of the embedding's outputs as they arrive, last in a round.

        Complete sums are added to the table's gradient meanwhile. With a frozen embedding, it only waits for the
        rows: after them, the devices have finished the iteration.
        """
        context = self._context
        order = [*context.plan.arrivals(context.plan.replicas)]  # the same on any number of devices
        if self._rows is not None:
            self._rows.begin(iteration.input_ids, order)
        last = Access(0, context.bounds.chain[0] - 1)
        for m in order:
            gradient, key, number = context.buffers.locate(last, iteration.number, m)
            context.board.wait(key, number - 1).synchronize()
            if context.probe is not None:
                context.probe(f"gradient rows m{m}")
            if self._rows is not None:
                self._rows.add(m, gradient)
                if head.is_set():
                    self._rows.apply()
            context.board.publish(key, number)
        context.board.publish(("rows",), iteration.number)

    def _arrival_order(self) -> Sequence[int]:
        """The units whose gradients come from devices."""
        spec = self._context.store.spec
        return spec.trained(unit for layer in reversed(spec.stack) for unit in layer.units)

    def _update_order(self) -> Sequence[int]:
        """The order of updates: in sync as the next forward reads the units, in async as gradients are overwritten."""
        spec = self._context.store.spec
        if self._context.lag:
            return [*dict.fromkeys((*self._arrival_order(), *spec.trained([0])))]
        return [*dict.fromkeys(spec.trained((0, *(unit for layer in spec.stack for unit in layer.units))))]

    def _update(self, iteration: Iteration, rate: float, result: StepResult) -> None:
        """Clips as torch.nn.utils.clip_grad_norm_ does and applies AdamW. A skipped step changes no weights."""
        version = iteration.number + 1
        if result.skipped:
            for index in self._update_order():
                state = self._next_unit(index)
                state.before = state.current
                self._context.board.publish(("version", index), version, state.current)
            return
        factor = iteration.rest / result.loss_scale
        if self._max_grad_norm:
            factor *= min(1.0, self._max_grad_norm / (result.grad_norm + 1e-6))
        self.applied += 1
        under_way: Sequence[Future[object]] = ()
        for index in self._update_order():
            state = self._next_unit(index)
            parts, writes = self._parts(state, index, rate, factor), state.wire_writes(state.spare)
            begun = self._adam.begin(parts, partial(self._publish, index, version), writes)
            ended(under_way)  # now, so that the threads always have work
            under_way = begun
        ended(under_way)

    def _next_unit(self, index: int) -> UnitState:
        """The state of the next unit, once a snapshot has read it."""
        state = self._context.store.units[index]
        self._where = f"update of {_label(state.unit.name)}"
        progressed()
        if self._snapshot is not None:
            self._snapshot.wait(index)
        if self._context.probe is not None:
            self._context.probe(f"optimizer {self._where}")
        return state

    def _publish(self, index: int, version: int) -> None:
        """Publishes an updated unit."""
        state = self._context.store.units[index]
        state.flip()
        self._context.board.publish(("version", index), version, state.current)

    def _parts(self, state: UnitState, index: int, rate: float, factor: float) -> Sequence[UpdateArgs]:
        source, target = state.params[state.newest], state.params[state.written]
        noise, parts = moments.noise(self._seed, self.applied, index), []
        for part, weight_decay in _decay_ranges(state.unit, self._weight_decay):
            of_part = state.moments_of(part)
            parts.append(
                UpdateArgs(
                    source=source[part],
                    target=target[part],
                    remainder=None if state.remainder is None else state.remainder[part],
                    masters=None if state.masters is None else state.masters[part],
                    grad=state.grad[part],
                    exp_avg=of_part["exp_avg"],
                    exp_avg_sq=of_part["exp_avg_sq"],
                    exp_avg_scale=of_part.get("exp_avg_scale"),
                    exp_avg_sq_scale=of_part.get("exp_avg_sq_scale"),
                    lr=rate,
                    weight_decay=weight_decay,
                    step=self.applied,
                    grad_scale=factor,
                    noise=noise + part.start,
                )
            )
        return parts

    def _wait_for_snapshot(self) -> None:
        if self._snapshot is not None:
            for index in self._update_order():
                self._snapshot.wait(index)


def _label(unit: str) -> str:
    """The name of a unit in messages."""
    return {"embed": "embedding", "norm": "final norm"}.get(unit, unit)


def _decay_ranges(unit: Unit, weight_decay: float) -> list[tuple[slice, float]]:
    """A unit's flat buffer as ranges of equal weight decay; padding belongs to the parameter before it."""
    ranges: list[tuple[slice, float]] = []
    segments = unit.segments
    for segment, stop in zip(segments, [*(s.offset for s in segments[1:]), unit.numel], strict=True):
        decay = weight_decay if segment.param.decay else 0.0
        if ranges and ranges[-1][1] == decay:
            ranges[-1] = (slice(ranges[-1][0].start, stop), decay)
        else:
            ranges.append((slice(segment.offset, stop), decay))
    return ranges
