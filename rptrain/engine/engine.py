"""The engine: owns devices, threads and memory, and is driven by two calls, `forward_backward` and `step`."""

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.devices.base import STREAMS, Device, Stream
from rptrain.engine.devices.cpu import CpuDevice
from rptrain.engine.devices.cuda import CudaDevice
from rptrain.engine.embedding import EmbeddingWorker
from rptrain.engine.errors import Aborted, EngineError
from rptrain.engine.failures import gpu_failure
from rptrain.engine.footprint import Footprint
from rptrain.engine.iteration import (
    Evaluation,
    Iteration,
    Pending,
    PendingLoss,
    StepRequest,
    StepResult,
    make_iteration,
)
from rptrain.engine.memory.boundary import BoundaryBuffers
from rptrain.engine.memory.page_locking import Locking, PageableRanges
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.meter import Measured, Reading, measured_stages
from rptrain.engine.optim.adam import CpuAdam
from rptrain.engine.optim.loss_scale import LossScale
from rptrain.engine.optimizer import Optimizer, OptimizerWorker
from rptrain.engine.partners import Partners
from rptrain.engine.progress import StepProgress, work_of
from rptrain.engine.recorder import UNOBSERVED, Activity, Observers, Recorder
from rptrain.engine.reproducible import Reproducible
from rptrain.engine.snapshot import Snapshot
from rptrain.engine.trace import Trace
from rptrain.engine.transfer.staging import Staging, StagingBuffers
from rptrain.engine.worker import Worker
from rptrain.kernels.batch import Batch
from rptrain.schedule.lower import boundaries
from rptrain.schedule.plan import Computation, Plan
from rptrain.schedule.validate import validate

FAILED = "has failed"
ITERATIONS_AHEAD = 2  # iterations in progress at once: one that ends, one that begins


@dataclass(frozen=True)
class Devices:
    """Devices by name, such as "cuda:0" or "cpu:0", and the memory of each."""

    names: Sequence[str]
    memory: Footprint  # what the plan needs
    limit: int | None = None  # bytes that tensors may take on a GPU; None: all


class Engine:
    """Trains the model in `store` on `devices` according to `plan`. Context manager; not thread-safe.

    Call n of `forward_backward` reads the weights after step n - 1 in sync, after step n - 2 in async; step n uses
    the gradients of call n. Both return at once: results are handles. The next call or handle raises an error of any
    thread as EngineError.
    """

    def __init__(
        self,
        store: ModelStore,
        plan: Plan,
        devices: Devices,
        optimizer: Optimizer,
        *,
        observers: Observers = UNOBSERVED,
        partners: Partners | None = None,
    ) -> None:
        """`partners`: the other processes, if several train the model; `plan` is for this one's groups of replicas."""
        layout, meter, names = store.layout, observers.meter, devices.names
        validate(plan, len(store.spec.stack))
        assert len(names) == plan.devices
        sizes = (layout.micro_batches, layout.round_size, layout.replicas)
        assert sizes == (plan.micro_batches, plan.round_size, plan.replicas)
        assert layout.share == (None if partners is None else partners.share)
        self.plan, self.store, self._layout = plan, store, layout
        self.trace = Trace() if observers.trace else None
        self._meter = meter
        self._partners = partners
        self._cuda = any(name.startswith("cuda") for name in names)
        self._next = self._steps = self._evaluations = 0  # calls of forward_backward, step, evaluate
        self._named = False  # the GPU that failed
        self._dropped = False  # the steps that were not applied
        self._threads: list[Worker | OptimizerWorker | EmbeddingWorker] = []
        with ExitStack() as stack:
            stack.callback(Reproducible(cuda=self._cuda, fp16_accumulation=layout.half_sums).restore)
            bounds = boundaries(plan.stages)
            buffers = BoundaryBuffers(bounds, plan, layout, store.spec.hidden_size)
            stack.callback(buffers.close)
            staging: StagingBuffers | None = None
            if len(store.in_memory) < len(store.units):
                staging = StagingBuffers(store.spec, layout.dtype, plan.devices)
                stack.callback(staging.close)
            self.locking = self._lock(buffers, staging)
            measured = measured_stages(store.spec, plan.stages) if meter is not None and meter.layers else ()
            recorder = Recorder(
                plan.devices, trace=self.trace, meter=meter, measured=measured, watched=observers.watched
            )
            on_failure = None if partners is None else partners.fail
            self._context = Context(plan, bounds, store, buffers, observers.probe, recorder, on_failure)
            self._publish_weights()
            adam = CpuAdam(optimizer.betas, optimizer.eps, optimizer.threads)
            stack.callback(adam.close)
            self._devices = [self._open(name, devices.limit, stack) for name in names]
            if partners is not None:
                partners.on_loss(partial(self._context.fail, "heartbeats"))
                stack.callback(partners.on_loss, None)
            stack.callback(self._end_threads)
            self._optimizer = OptimizerWorker(self._context, adam, optimizer, partners)
            self._threads.append(self._optimizer)
            self._threads.append(EmbeddingWorker(self._context))
            self._start_workers(devices.memory, staging)
            self._resources = stack.pop_all()

    def _lock(self, buffers: BoundaryBuffers, staging: StagingBuffers | None) -> Locking:
        """Page-locks these buffers for GPUs, at the cost of the store if the system locks no more: computation waits
        for the activations of each micro-batch. Returns what is locked in total; CPU workers need nothing locked.
        """
        locking = Locking()
        if self._cuda:
            for each in (buffers, *([] if staging is None else [staging])):
                each.lock()
                if self.store.unlock(each.locking.missing):
                    each.lock()
                locking += each.locking
            locking += self.store.locking
        return locking

    def _publish_weights(self) -> None:
        """Publishes the versions of the weights that the first iterations read."""
        board = self._context.board
        for index, state in enumerate(self.store.units):
            if not state.unit.trainable:
                board.publish_constant(("version", index), state.current)
                continue
            for version, generation in ((-1, state.before), (0, state.current)):
                board.publish(("version", index), version, generation)

    def _start_workers(self, sizes: Footprint, staging: StagingBuffers | None) -> None:
        for index, device in enumerate(self._devices):
            staged = None if staging is None else Staging(self._context, index, staging.of[index])
            self._threads.append(Worker(self._context, index, device, sizes, staged))

    def _open(self, name: str, limit: int | None, stack: ExitStack) -> Device:
        kind, _, index = name.partition(":")
        probe = self._context.probe
        if kind == "cuda":
            pageable = PageableRanges(self.locking.pageable) if self.locking.pageable else None
            device: Device = CudaDevice(int(index), limit, probe, pageable)
        else:
            device = CpuDevice(name, self._context.aborted, self._context.fail, probe)
        stack.callback(self._close_device, device)
        return device

    @property
    def applied(self) -> int:
        """Steps that were not skipped, over the whole training run. Up to date after `synchronize`."""
        return self._optimizer.applied

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the newest weights. Up to date after `synchronize`."""
        return self._optimizer.loss_scale

    def forward_backward(self, batch: Batch) -> PendingLoss:
        """Starts an iteration of the plan's micro-batches or fewer. The handle returns the loss (float), the mean over
        the batch's supervised tokens.
        """
        self._check()
        self._check_size(batch)
        if self._next != self._steps:
            raise RuntimeError("forward_backward was called twice without step between")
        if self._next >= ITERATIONS_AHEAD:
            self._wait(("step",), self._next - ITERATIONS_AHEAD)
        iteration = self._iteration(batch)
        self._next += 1
        self._context.recorder.submit(iteration.number, iteration.micro_batches)
        self._context.skip(iteration)
        for thread in self._threads:
            thread.submit(iteration)

        def losses() -> Tensor:
            if self._partners is not None:
                self._wait(("losses",), iteration.number)
                return iteration.step_losses[0]
            for r in range(self.plan.rounds):
                self._wait(("loss", r), iteration.number)
            try:
                for event in iteration.losses_sent:
                    event.synchronize()
            except Aborted:
                self._check()
                raise
            except RuntimeError as error:  # of a GPU, which may fail after it has computed the losses
                self._context.fail("losses", error)
            self._check()
            return iteration.losses

        return PendingLoss(losses, batch.supervised)

    def step(self, learning_rate: float) -> Pending:
        """Lets the optimizer apply the gradients of the last `forward_backward`. The handle returns a StepResult."""
        self._check()
        if self._steps != self._next - 1:
            raise RuntimeError("step was called without forward_backward before")
        number = self._steps
        self._steps += 1
        request = StepRequest(learning_rate)
        self._optimizer.submit(request)

        def result() -> StepResult:
            self._wait(("step",), number)
            assert request.result is not None
            return request.result

        return Pending(result)

    def _iteration(self, batch: Batch) -> Iteration:
        """The iteration of a step's batch, or of the micro-batches of this process."""
        share = self._layout.share
        own = batch if share is None else share.batch(batch, self.plan)
        return make_iteration(self._next, own, self._layout.wide, pin=self._cuda, whole=batch)

    def _check_size(self, batch: Batch) -> None:
        share = self._layout.share
        groups = self.plan.replicas if share is None else share.replicas
        expected = (self.plan.micro_batches // self.plan.replicas * groups, self._layout.tokens)
        count, tokens = batch.input_ids.shape
        if not 1 <= count <= expected[0] or tokens != expected[1]:
            raise ValueError(f"the batch is {(count, tokens)}, the plan is for {expected} at most")

    def synchronize(self) -> None:
        """Waits until every step was applied; `store` then holds W_T (and, in async, W_{T-1})."""
        if self._steps:
            self._wait(("step",), self._steps - 1)
        self._check()

    def ended(self, step: int, seconds: float) -> bool:
        """Whether a step (counted from 0 since the engine was opened) was applied; waits for it for at most this many
        seconds.
        """
        try:
            return self._context.board.reached(("step",), step, seconds)
        except Aborted:
            self._check()
            raise

    def hold(self) -> int:
        """Let no further step be applied. Waits for the end of an update that has begun, and returns how many steps
        were applied since the engine was opened.
        """
        try:
            return self._optimizer.hold()
        except Aborted:
            self._check()
            raise

    def drop(self) -> None:
        """After `hold`, end the work on the steps that were not applied. Only `snapshot` and `close` may follow."""
        self._dropped = True
        self._context.board.abort()

    def evaluate(self, batch: Batch) -> float:
        """Returns the loss of a batch of a step's size or less, summed over its supervised tokens.

        Runs the forward pass with the newest weights, W_T, and waits for them. Training is not affected. Raises
        RuntimeError between `forward_backward` and its `step`, and ValueError for a larger batch.
        """
        if self._next != self._steps:
            raise RuntimeError("call step() before evaluate()")
        self._check_size(batch)
        self.synchronize()
        iteration = self._iteration(batch)
        number, workers = self._evaluations, [thread for thread in self._threads if isinstance(thread, Worker)]
        self._evaluations += 1
        for worker in workers:
            worker.submit(Evaluation(iteration, number))
        for index in range(len(workers)):
            self._wait(("evaluated", index), number)
        losses = iteration.losses
        if self._partners is not None:
            self._optimizer.submit(Evaluation(iteration, number))
            self._wait(("evaluation losses",), number)
            losses = iteration.step_losses[0]
        return losses.double().sum().item()

    def snapshot(self) -> Snapshot:
        """Waits for all steps so far and returns their state, whose units do not change until they are released.

        Training continues up to the first update of a unit that was not released. One snapshot at a time. After
        `drop`, it is the state after the last step that was applied.
        """
        if not self._dropped:
            self.synchronize()
        return self._optimizer.snapshot()

    def waiting(self) -> dict[str, str]:
        """The board's key and number that each blocked thread waits for, and the streams that have work."""
        threads = {
            name: f"waits for {' '.join(map(str, key)) if isinstance(key, tuple) else key}, number {number}"
            for name, (key, number) in self._context.board.waiting().items()
        }
        streams = {f"{device.name} {stream}": getattr(device, stream) for device in self._devices for stream in STREAMS}
        states = {f"{name} stream": _state(stream) for name, stream in streams.items()}
        return threads | {name: state for name, state in states.items() if state}

    def measured(self) -> Measured | None:
        """Ends the measurement and returns the times of the steps so far; call `synchronize` to include all of them.

        None without `meter`, or if too few steps after its warm-up were applied.
        """
        self._context.recorder.meter = None
        return None if self._meter is None else self._meter.measured(self.store.spec)

    def activity(self) -> Activity:
        """The current activity of threads and devices of a `watched` engine. Thread-safe while it is open."""
        waiting = self._context.board.waiting()
        lanes = (
            recorder.state(waiting[device.name][0] if device.name in waiting else None)
            for recorder, device in zip(self._context.recorder.devices, self._devices, strict=True)
        )
        queue = self._steps - self._context.board.count(("step",))
        return Activity(tuple(lanes), self._optimizer.doing, self._optimizer.seconds, queue)

    def computations(self) -> tuple[list[Computation], ...]:
        """The last iterations' computations on each device of a `watched` engine. Thread-safe while it is open."""
        return tuple(recorder.computations() for recorder in self._context.recorder.devices)

    @property
    def starved(self) -> float:
        """Seconds in which devices of a `watched` engine waited for updated weights, on average over the devices."""
        devices = self._context.recorder.devices
        return sum(device.starved for device in devices) / len(devices)

    def progress(self, step: int) -> StepProgress:
        """How far a step is that was submitted (counted from 0 since the engine was opened). Any thread may ask."""
        recorder, optimizer = self._context.recorder, self._optimizer
        micro_batches = recorder.micro_batches.get(step, self.plan.micro_batches)
        work = micro_batches * sum(map(work_of, self.plan.stages))
        units = len([*self.store.spec.trained(range(len(self.store.units)))])
        done = sum(device.work.get(step, 0) for device in recorder.devices)
        return StepProgress(
            micro_batches,
            min(done / work, 1.0) if work else 1.0,  # a process may have no micro-batch of a short step
            min(max(optimizer.updates - step * units, 0) / units, 1.0),
            min((began for device in recorder.devices if (began := device.began.get(step)) is not None), default=None),
            optimizer.seconds or 0.0,
        )

    @property
    def readings(self) -> tuple[Reading, ...]:
        """All readings of `meter`."""
        return () if self._meter is None else self._meter.readings

    def _wait(self, key: Hashable, number: int) -> Any:
        try:
            return self._context.board.wait(key, number)
        except Aborted:
            self._check()
            raise

    def _check(self) -> None:
        if self._context.failure is not None:
            self._name_device(self._context.failure)
            raise self._context.failure

    def _name_device(self, failure: EngineError) -> None:
        """Names the GPU at fault. Another one's thread may have met the error first, as it waited for the GPU's work:
        the streams of a failed GPU refuse every call.
        """
        if self._named or gpu_failure(failure) is None:
            return
        self._named, labels = True, {device.name: device.label for device in self._devices}
        failed = [device.label for device in self._devices if _state(device.compute) == FAILED]
        failure.device = failed[0] if len(failed) == 1 else labels.get(failure.device, "")

    @property
    def _gpu_lost(self) -> bool:
        failed = self._context.failure and gpu_failure(self._context.failure)
        return self._cuda and failed is not None and failed.final

    def _close_device(self, device: Device) -> None:
        if not self._gpu_lost:
            device.close()

    def _end_threads(self) -> None:
        for thread in self._threads:
            thread.submit(None)
        for thread in self._threads:
            thread.join()
        if self._gpu_lost:  # other GPUs may wait for its work, which never ends; memory is freed with the process
            return
        for device in self._devices:  # all devices before any memory is freed: freeing one's may touch the others'
            device.finish()
        self._threads.clear()  # frees their device memory before the devices are closed

    def close(self) -> None:
        """Ends the threads and frees memory. Waits for submitted work, unless a thread has failed."""
        self._resources.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._context.board.abort()  # releases the threads that wait for work in progress
            if self._partners is not None:
                self._partners.fail(error)
        try:
            self.close()
        except RuntimeError:  # a failed GPU cannot be synchronized either; the first failure matters more
            self._check()
            raise
        if error is None:
            self._check()


def _state(stream: Stream) -> str:
    """What a stream does, without waiting for it; empty if it has no work."""
    try:
        return "has work" if stream.busy() else ""
    except RuntimeError:  # CUDA refuses every call once a GPU has failed
        return FAILED
