"""The trace of an engine: when devices computed, and when their inputs, parameters and output buffers were ready.

Times are on the scale of `time.perf_counter`. Marks are in the streams: nothing waits for them, and nothing that is
computed depends on them. `rptrain/bench/idle.py` interprets them.
"""

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from rptrain.engine.board import HISTORY, Board
from rptrain.engine.meter import Stamp
from rptrain.schedule.plan import Slot

Work = int | Literal["zeroing"]  # the number of a micro-batch, or the zeroing of gradient accumulators
KEPT = 4  # submissions that are kept, more than there are iterations in progress


@dataclass(frozen=True)
class Blocked:
    """The time that a thread waited for another; `kind` is the first word of the board's key."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Submission:
    """The submission of an iteration, and what its caller was blocked by since the previous submission."""

    time: float
    blocked: tuple[Blocked, ...]


@dataclass(frozen=True)
class Copy:
    """The copy of an input: when it was issued, when its producer had finished, and when it arrived."""

    issued: float
    began: Stamp
    arrived: Stamp


@dataclass(frozen=True)
class Arrival:
    """An upload of parameters: when the last version was published, and when all parameters were on the device."""

    published: float
    arrived: Stamp


@dataclass(frozen=True)
class ComputeInterval:
    """A computation of a device without a wait in between."""

    launched: float  # when the host began to launch it
    start: Stamp
    end: Stamp
    parameters: Arrival | None  # the upload that it waited for


@dataclass
class Span:
    """A unit of work of a slot: a micro-batch or, in a backward stage, the zeroing of gradient accumulators.

    The pieces of a micro-batch are those of its stage pass.
    """

    iteration: int
    slot: Slot
    work: Work
    submission: Submission
    blocked: tuple[Blocked, ...]  # waits of the worker's thread since the previous span
    begun: float  # when the thread began to issue it
    issued: float  # when the thread had issued it, with its windows of transfers
    copies: list[Copy] = field(default_factory=list)
    pieces: list[ComputeInterval] = field(default_factory=list)
    freed: list[Stamp] = field(default_factory=list)  # when the buffers of its outputs became free
    waited: float = 0.0  # seconds that the thread waited for the device, which had enough to compute
    embedded: float = -inf  # when the weights that its iteration's embedding read were published

    @property
    def micro_batch(self) -> int | None:
        return self.work if isinstance(self.work, int) else None

    def start(self) -> float:
        return self.pieces[0].start()

    def end(self) -> float:
        return self.pieces[-1].end()

    def compute(self, piece: ComputeInterval) -> None:
        """Appends a piece, which was just issued."""
        self.pieces.append(piece)
        self.issued = time.perf_counter()


class WatchedBoard(Board):
    """A board that records when numbers were published, and what threads were blocked by."""

    def __init__(self) -> None:
        super().__init__()
        self._times: dict[tuple[Hashable, float], float] = {}
        self._thread = threading.local()

    def publish(self, key: Hashable, number: int, payload: Any = None) -> None:
        self._times[key, number] = time.perf_counter()
        self._times.pop((key, number - HISTORY), None)
        super().publish(key, number, payload)

    def publish_constant(self, key: Hashable, payload: Any = None) -> None:
        self._times[key, inf] = time.perf_counter()
        super().publish_constant(key, payload)

    def published(self, key: Hashable, number: int) -> float:
        """The time when one of the last numbers, or the key's constant, was published."""
        return self._times[key, inf if (key, inf) in self._times else number]

    def wait(self, key: Hashable, number: int) -> Any:
        blocked: list[Blocked] | None = getattr(self._thread, "blocked", None)
        if blocked is None or self.ready(key, number):
            return super().wait(key, number)
        start = time.perf_counter()
        payload = super().wait(key, number)
        kind = key[0] if isinstance(key, tuple) else key
        blocked.append(Blocked(str(kind), start, time.perf_counter()))
        return payload

    def blocked(self) -> tuple[Blocked, ...]:
        """The waits of the calling thread since its last call; recording begins with a thread's first call."""
        found = getattr(self._thread, "blocked", ())
        self._thread.blocked = []
        return tuple(found)


class Trace:
    """The spans that were issued and not yet taken. Thread-safe."""

    def __init__(self) -> None:
        self.board = WatchedBoard()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._submissions: dict[int, Submission] = {}

    def submit(self, iteration: int) -> None:
        """Records a submission. Called by the engine's caller before a worker has the iteration."""
        self._submissions[iteration] = Submission(time.perf_counter(), self.board.blocked())
        self._submissions.pop(iteration - KEPT, None)

    def begin(self, iteration: int, slot: Slot, work: Work) -> Span:
        """Starts a span. Called by a worker's thread, which fills the span while it issues the work."""
        blocked, now = self.board.blocked(), time.perf_counter()
        span = Span(iteration, slot, work, self._submissions[iteration], blocked, now, now)
        with self._lock:
            self._spans.append(span)
        return span

    def take(self, iteration: int) -> list[Span]:
        """Removes and returns an iteration's spans, in the order in which they were issued."""
        with self._lock:
            taken = [span for span in self._spans if span.iteration == iteration]
            self._spans = [span for span in self._spans if span.iteration != iteration]
        return taken
