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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from rptrain.engine.context import Context
from rptrain.engine.devices.base import stamp
from rptrain.engine.errors import Aborted
from rptrain.engine.iteration import Evaluation, Iteration, StepRequest, StepResult
from rptrain.engine.memory import moments
from rptrain.engine.memory.unit_state import UnitState
from rptrain.engine.optim.adam import CpuAdam, UpdateArgs
from rptrain.engine.optim.gradients import Gradients, arrival_order, label
from rptrain.engine.optim.loss_scale import UNSCALED, LossScale
from rptrain.engine.partners import Partners, Weights
from rptrain.engine.snapshot import Snapshot
from rptrain.models.params import Unit
from rptrain.utils.liveness import progressed
from rptrain.utils.native import ended

PATIENCE = 5.0  # seconds for threads to end after a failure
POLL = 0.1  # seconds after which a failure is noticed


@dataclass(frozen=True)
class Optimizer:
    """AdamW with decoupled weight decay, and where it begins: `applied` and `loss_scale`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0  # 0: no clipping
    threads: int | None = None
    seed: int = 0  # for the stochastic rounding of small moments
    applied: int = 0  # steps that were not skipped, over the whole training run, for bias correction
    loss_scale: LossScale = UNSCALED  # of the newest weights


class OptimizerWorker:
    """Takes an iteration and its step in turn; publishes ("scale",), ("version", unit) and ("step",)."""

    def __init__(self, context: Context, adam: CpuAdam, optimizer: Optimizer, partners: Partners | None = None) -> None:
        """`partners`: the other processes, if several train the model."""
        self._context, self._adam, self._optimizer = context, adam, optimizer
        self.applied = optimizer.applied
        self.loss_scale = optimizer.loss_scale  # loss scale of the weights after the last step
        for version, scale in ((-1, self.loss_scale.before), (0, self.loss_scale.scale)):
            context.board.publish(("scale",), version, scale)
        self._snapshot: Snapshot | None = None  # the snapshot that updates wait for
        self._snapshots = 0
        self._where = "waiting"
        self._weights: Weights | None = None
        if partners is None:
            self._gradients = Gradients(context, adam, self._tell)
        else:
            self._gradients = partners.sum_gradients(context, adam, self._tell)
            self._weights = partners.exchange_weights(context, adam, self._publish)
        self.seconds: float | None = None  # duration of the last update
        self.updates = 0  # of units that have begun
        self._turn = threading.Lock()  # held for a moment, when an update may begin
        self._updating = self._held = False
        self._queue: queue.SimpleQueue[Iteration | Evaluation | StepRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=context.guard, args=(lambda: self._where, self._main), name="optimizer", daemon=True
        )
        self._thread.start()

    def submit(self, item: Iteration | Evaluation | StepRequest | None) -> None:
        """Submits an iteration, the step that follows it, or None to end the thread.

        An evaluation is for the losses of other processes; ("evaluation losses",) is published after them.
        """
        self._queue.put(item)

    @property
    def doing(self) -> str:
        return self._where

    def _tell(self, where: str) -> None:
        self._where = where

    def snapshot(self) -> Snapshot:
        """Starts a snapshot of the state after the last step. No step may be in progress, and no other snapshot."""
        assert self._snapshot is None or self._snapshot.released, "one snapshot at a time"
        order = self._update_order()
        self._snapshot = Snapshot(self._context.board, self._snapshots, order, self.applied, self.loss_scale)
        self._snapshots += 1
        return self._snapshot

    def hold(self) -> int:
        """Begins no further update. Returns how many steps are applied, once an update that has begun has ended."""
        board = self._context.board
        with self._turn:
            self._held = True
            applied = board.count(("step",)) + self._updating
        if applied:
            board.wait(("step",), applied - 1)
        return applied

    def join(self) -> None:
        """Waits for the thread to end, and frees its memory."""
        if self._weights is None:
            self._thread.join()
        else:
            aborted = self._context.aborted  # the last update is exchanged before the second thread ends
            if not (join_all((self._thread,), aborted) and join_all(self._weights.end(), aborted)):
                return  # they wait for a message; their memory stays
        self._gradients.join()

    def _main(self) -> None:
        while (iteration := self._queue.get()) is not None:
            if isinstance(iteration, Evaluation):
                self._gradients.share_losses(iteration.iteration)
                self._context.board.publish(("evaluation losses",), iteration.number)
                continue
            if not isinstance(iteration, Iteration):
                return
            square_sum = self._gradients.square_sum(iteration)
            request = self._queue.get()
            if not isinstance(request, StepRequest):
                return
            self._begin_update()
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
            with self._turn:
                self._updating = False
                self._context.board.publish(("step",), iteration.number)
            self._where = "waiting"

    def _begin_update(self) -> None:
        """Raises Aborted if updates are held."""
        with self._turn:
            if self._held:
                raise Aborted
            self._updating = True

    def _update_order(self) -> Sequence[int]:
        """The order of updates: in sync as the next forward reads the units, in async as gradients are overwritten."""
        spec = self._context.store.spec
        if self._context.lag:
            return [*dict.fromkeys((*arrival_order(spec), *spec.trained([0])))]
        return [*dict.fromkeys(spec.trained((0, *(unit for layer in spec.stack for unit in layer.units))))]

    def _update(self, iteration: Iteration, rate: float, result: StepResult) -> None:
        """Clips as torch.nn.utils.clip_grad_norm_ does and applies AdamW. A skipped step changes no weights."""
        version = iteration.number + 1
        if result.skipped:
            for index in self._update_order():
                state = self._next_unit(index)
                state.before = state.current
                if self._weights is not None:
                    self._context.board.publish(("updated", index), iteration.number)
                self._context.board.publish(("version", index), version, state.current)
            return
        factor = iteration.rest / result.loss_scale
        if limit := self._optimizer.max_grad_norm:
            factor *= min(1.0, limit / (result.grad_norm + 1e-6))
        self.applied += 1
        under_way: Sequence[Future[object]] = ()
        order = self._update_order()
        if self._weights is not None:
            self._weights.submit(version, order)
        for index in order:
            state = self._next_unit(index)
            parts = self._parts(state, index, rate, factor)
            if self._weights is None:
                then, writes = partial(self._publish, index, version), state.wire_writes(state.spare)
            else:  # which are complete once the other processes have sent theirs
                then, writes = partial(self._context.board.publish, ("updated", index), iteration.number), ()
            begun = self._adam.begin(parts, then, writes)
            ended(under_way)  # now, so that the threads always have work
            under_way = begun
        ended(under_way)
        for index in order:
            self._context.board.wait(("version", index), version)

    def _next_unit(self, index: int) -> UnitState:
        """The state of the next unit, once a snapshot has read it."""
        state = self._context.store.units[index]
        self._where = f"update of {label(state.unit.name)}"
        self.updates += 1
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
        noise, parts = moments.noise(self._optimizer.seed, self.applied, index), []
        for part, weight_decay in _decay_ranges(state.unit, self._optimizer.weight_decay, state.own):
            of_part = {name: state.own_part(flat, part) for name, flat in state.moments.items()}
            parts.append(
                UpdateArgs(
                    source=source[part],
                    target=target[part],
                    remainder=None if state.remainder is None else state.own_part(state.remainder, part),
                    masters=None if state.masters is None else state.own_part(state.masters, part),
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


def _decay_ranges(unit: Unit, weight_decay: float, own: slice) -> list[tuple[slice, float]]:
    """A part of a unit's flat buffer as ranges of equal weight decay; padding belongs to the parameter before it."""
    ranges: list[tuple[slice, float]] = []
    segments = unit.segments
    for segment, stop in zip(segments, [*(s.offset for s in segments[1:]), unit.numel], strict=True):
        decay, start = weight_decay if segment.param.decay else 0.0, max(segment.offset, own.start)
        stop = min(stop, own.stop)
        if start >= stop:
            continue
        if ranges and ranges[-1][1] == decay:
            ranges[-1] = (slice(ranges[-1][0].start, stop), decay)
        else:
            ranges.append((slice(start, stop), decay))
    return ranges


def join_all(threads: Sequence[threading.Thread], aborted: Callable[[], bool]) -> bool:
    """Waits until the threads end. After a failure they are left behind after PATIENCE seconds: they may wait for a
    message, which nothing interrupts. Returns whether all have ended.
    """
    deadline = None
    while any(thread.is_alive() for thread in threads):
        if deadline is None and aborted():
            deadline = time.monotonic() + PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            return False
        for thread in threads:
            thread.join(POLL)
    return True
