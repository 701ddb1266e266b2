"""Recording what the engine does: the current activity of each device and, if asked for, a trace and layer times.

The engine's threads call a recorder wherever something is worth recording, and the recorder decides what to keep. Time
stamps are marks in the streams: nothing waits for them, and nothing that is computed depends on them.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf

from rptrain.engine import meter
from rptrain.engine.board import Board
from rptrain.engine.devices.base import Mark, Probe, Stream
from rptrain.engine.meter import Meter, Stamp
from rptrain.engine.progress import work_of
from rptrain.engine.trace import Arrival, ComputeInterval, Copy, Span, Trace, Work
from rptrain.schedule.plan import Computation, Kind, Slot, Stage

KEPT = 8  # iterations of which the computations are kept

LayerTimer = Callable[[meter.Kind, int], AbstractContextManager[None]]  # kind of pass, the layer's place in the stack

REASONS = {  # what a device's thread waits for, by the first word of the board's key
    "boundary": "activations",
    "version": "the optimizer",
    "grad": "gradient accumulators",
    "scale": "the loss scale",
    "staged": "model files",
}


@dataclass(frozen=True)
class Pass:
    """A micro-batch that was issued to a device, in pieces that are computed without a wait inside."""

    iteration: int  # counts from 0 since the engine was opened
    slot: Slot
    micro_batch: int
    pieces: list[tuple[Mark, Mark]] = field(default_factory=list)

    @property
    def computing(self) -> bool:
        return any(start.passed() and not end.passed() for start, end in tuple(self.pieces))

    @property
    def seconds(self) -> float:
        """Computation time up to now."""
        now = time.perf_counter()
        return sum((end() if end.passed() else now) - start() for start, end in tuple(self.pieces) if start.passed())


@dataclass(frozen=True)
class LaneState:
    """The state of a device; `busy`, `up` and `down` count from when the engine was opened."""

    current: Pass | None  # the micro-batch it computes, or will compute once its inputs have arrived
    computing: bool
    waiting: str | None  # what it waits for if it does not compute; None if it has nothing to do
    busy: Mapping[Kind, float]  # seconds of computation, by kind of stage
    up: int  # bytes of copies to the device that were issued
    down: int


@dataclass(frozen=True)
class Activity:
    """The state of an engine."""

    lanes: tuple[LaneState, ...]
    optimizer: str  # what its thread does
    update_seconds: float | None  # duration of the last update; None before the first
    queue: int  # steps that were submitted and not applied


@dataclass(frozen=True)
class Observers:
    """What records or measures a run; nothing that is computed depends on it."""

    trace: bool = False  # whether a trace is kept
    meter: Meter | None = None
    watched: bool = False  # device states have times, at the price of two marks per computation
    probe: Probe | None = None


UNOBSERVED = Observers()


class Recorder:
    """The records of an engine: a `DeviceRecorder` for each device, a trace and a meter where they are asked for."""

    def __init__(
        self,
        devices: int,
        *,
        trace: Trace | None = None,
        meter: Meter | None = None,
        measured: tuple[Stage, ...] = (),
        watched: bool = False,
    ) -> None:
        """`measured`: the stages whose layers are measured. `watched`: device states have times, at the price of two
        marks per computation.
        """
        self.trace, self.meter = trace, meter
        self._measured = measured
        self.board = Board() if trace is None else trace.board
        self.devices = tuple(DeviceRecorder(self, watched=watched) for _ in range(devices))
        self.micro_batches: dict[int, int] = {}  # of the last iterations

    def submit(self, iteration: int, micro_batches: int) -> None:
        """Records that the engine's caller submits an iteration. Called before a worker has it."""
        self.micro_batches[iteration] = micro_batches
        self.micro_batches.pop(iteration - KEPT, None)
        if self.trace is not None:
            self.trace.submit(iteration)

    def timed(
        self,
        stamp: Callable[[], Stamp],
        iteration: int,
        kind: meter.Kind,
        subject: int = 0,
        unit: int | None = None,
    ) -> AbstractContextManager[None]:
        """Measures the work inside, with the time stamps of its stream, if there is a meter."""
        return meter.timed(self.meter, stamp, iteration, kind, subject, unit)

    def layer_timer(self, stream: Stream, iteration: int, slot: Slot) -> LayerTimer | None:
        """Measures passes over layers; None if they are not measured, so that a stage can be replayed as graphs.

        An iteration measures one stage in one round: several devices that launch layer by layer delay each other.
        """
        measured_by = self.meter
        if measured_by is None or not self._measured or iteration < measured_by.warm_up or slot.round > 0:
            return None
        if slot.stage != self._measured[(iteration - measured_by.warm_up) % len(self._measured)]:
            return None
        return partial(meter.timed, measured_by, stream.stamp, iteration)


class DeviceRecorder:
    """The records of one device. The device's thread writes them; any thread may call `state`.

    A micro-batch is recorded from `begin` to `issued`; `finish` follows when its computation has ended.
    """

    def __init__(self, recorder: Recorder, *, watched: bool) -> None:
        self._recorder, self._watched = recorder, watched
        self._up = self._down = 0  # bytes of copies that were issued
        self._busy: dict[Kind, float] = {"F": 0.0, "FB": 0.0, "B": 0.0}
        self.starved = 0.0  # seconds in which a watched device had nothing to compute for want of updated weights
        self._in_progress: deque[Pass] = deque()
        self.began: dict[int, float] = {}  # of the last iterations: when its first pass was, by `time.monotonic`
        self.work: dict[int, int] = {}  # of the last iterations: the passes that were issued, by `work_of`
        self._computed: deque[Computation] = deque()  # that have ended, of the last iterations
        self._issuing: Pass | None = None  # the micro-batch of which pieces are still to come
        self._span: Span | None = None  # the micro-batch that is being issued, in a traced engine
        self._left: dict[int, Mark] = {}  # by entry of the output ring: when its last output had reached the host

    def begin(self, iteration: int, slot: Slot, micro_batch: int) -> None:
        if iteration not in self.work:
            self.work[iteration], self.began[iteration] = 0, time.monotonic()
            if len(self.work) > KEPT:  # a device may have no part in an iteration
                del self.work[oldest := next(iter(self.work))], self.began[oldest]
        self._span = self._new_span(iteration, slot, micro_batch)
        self._issuing = Pass(iteration, slot, micro_batch)
        self._in_progress.append(self._issuing)

    @contextmanager
    def receiving(self, stream: Stream, nbytes: int) -> Iterator[None]:
        """Around the copy of an input to the device."""
        self.uploaded(nbytes)
        if self._span is None:
            yield
            return
        issued, began = time.perf_counter(), stream.mark()
        yield
        self._span.copies.append(Copy(issued, began, stream.mark()))

    def uploaded(self, nbytes: int) -> None:
        """A copy to the device was issued."""
        self._up += nbytes

    def downloaded(self, nbytes: int) -> None:
        """A copy to the host was issued."""
        self._down += nbytes

    def claimed(self, entries: Iterable[int], embedding_version: int) -> None:
        """The micro-batch will write these entries of the output ring.

        `embedding_version`: the version of the embedding's weights that made its iteration's first activations.
        """
        if self._span is not None and self._recorder.trace is not None:
            self._span.freed = [self._left[entry] for entry in entries if entry in self._left]
            self._span.embedded = self._recorder.trace.board.published(("version", 0), embedding_version)

    @contextmanager
    def computing(self, stream: Stream, parameters: Arrival | None = None) -> Iterator[None]:
        """Around a part of the micro-batch that is computed without a wait; `parameters`: what it waited for before."""
        if self._span is None and not self._watched:
            yield
            return
        launched, start = time.perf_counter(), stream.mark()
        yield
        end = stream.mark()
        self._in_progress[-1].pieces.append((start, end))
        if self._span is not None:
            self._span.compute(ComputeInterval(launched, start, end, parameters))

    @contextmanager
    def waiting_for_room(self) -> Iterator[None]:
        """Around a wait of the thread until its device has computed some of what was issued."""
        start = time.perf_counter()
        yield
        if self._span is not None:
            self._span.waited += time.perf_counter() - start

    @contextmanager
    def waiting_for_optimizer(self) -> Iterator[None]:
        """Around a wait of the thread until the optimizer, of whatever process, has updated a unit."""
        began = time.perf_counter()
        yield
        now = time.perf_counter()
        last = next((one.pieces[-1][1] for one in reversed(self._in_progress) if one.pieces), None)
        computed = began if last is None else last() if last.passed() else now
        self.starved += now - min(max(began, computed), now)

    @contextmanager
    def computing_gradients(self, stream: Stream, iteration: int, slot: Slot) -> Iterator[None]:
        """Around the zeroing of a slot's gradient accumulators."""
        span = self._new_span(iteration, slot, "zeroing")
        if span is None:
            yield
            return
        launched, start = time.perf_counter(), stream.mark()
        yield
        span.compute(ComputeInterval(launched, start, stream.mark(), None))

    def sent(self, entry: int, stream: Stream, nbytes: int) -> None:
        """The copy of an entry of the output ring to the host was issued."""
        self.downloaded(nbytes)
        if self._span is not None:
            self._left[entry] = stream.mark()

    def issued(self) -> None:
        """The micro-batch, and the transfers that go with it, were issued."""
        if self._issuing is not None:
            self.work[self._issuing.iteration] += work_of(self._issuing.slot.stage)
        self._issuing = None
        if self._span is not None:
            self._span.issued = time.perf_counter()

    def finish(self) -> None:
        """The computation of the oldest micro-batch in progress has ended."""
        done = self._in_progress[0]
        computed = [*_computations(done)]
        self._computed.extend(computed)  # before it leaves, so that another thread finds it
        while self._computed and self._computed[0].iteration <= done.iteration - KEPT:
            self._computed.popleft()
        self._in_progress.popleft()
        self._busy[done.slot.stage.kind] += sum(one.end - one.start for one in computed)

    def arrival(self, units: Iterable[int], version: int, stream: Stream) -> Arrival | None:
        """In a traced engine, when this version of the units was published, and when the upload stream has it."""
        trace = self._recorder.trace
        if trace is None:
            return None
        published = max((trace.board.published(("version", unit), version) for unit in units), default=-inf)
        return Arrival(published, stream.mark())

    def state(self, waits_for: Hashable | None) -> LaneState:
        """The device's state, accurate to a micro-batch. `waits_for`: the board's key that its thread waits for."""
        busy, issuing, in_progress = dict(self._busy), self._issuing, tuple(self._in_progress)
        for one in in_progress:
            busy[one.slot.stage.kind] += one.seconds
        left = [one for one in in_progress if one is issuing or not one.pieces or not one.pieces[-1][1].passed()]
        computing = bool(left) and left[0].computing
        waiting = None
        if waits_for is not None and not computing:
            waiting = REASONS[waits_for[0]] if isinstance(waits_for, tuple) else str(waits_for)
        elif left and not computing:
            waiting = "inputs" if left[0].pieces else "launch"
        return LaneState(left[0] if left else None, computing, waiting, busy, self._up, self._down)

    def computations(self) -> list[Computation]:
        """The computations of the last iterations, each once; those in progress last until now. Any thread may call
        this.
        """
        in_progress = [one for done in tuple(self._in_progress) for one in _computations(done)]
        ended = list(self._computed)
        known = {one.start for one in ended}
        return [*ended, *(one for one in in_progress if one.start not in known)]

    def _new_span(self, iteration: int, slot: Slot, work: Work) -> Span | None:
        trace = self._recorder.trace
        return None if trace is None else trace.begin(iteration, slot, work)


def _computations(done: Pass) -> Iterator[Computation]:
    """The pieces of a micro-batch that have begun, on the scale of `time.perf_counter`."""
    now = time.perf_counter()
    for start, end in tuple(done.pieces):
        if start.passed():
            yield Computation(done.iteration, done.slot.index, start(), end() if end.passed() else now)
