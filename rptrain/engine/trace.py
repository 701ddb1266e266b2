"""What a traced engine notes: when each device computed what, and when that which it waited for was there.

Times are on `time.perf_counter`'s scale. Marks lie in the streams, so nothing waits for them, and nothing that is
computed depends on them. `rptrain/bench/idle.py` says what they mean.
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

Work = int | Literal["zeroing", "rounding"]  # the number of a micro-batch, or of gradient sums
KEPT = 4  # submissions: those of the iterations under way are among the last


@dataclass(frozen=True)
class Blocked:
    """From when to when a thread waited for another; `kind` is the first word of the board's key."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Submission:
    """When an iteration was submitted, and what its caller was blocked by since it submitted the one before."""

    time: float
    blocked: tuple[Blocked, ...]


@dataclass(frozen=True)
class Copy:
    """An input: when its copy was issued, when it could begin as its producer was done, when it had arrived."""

    issued: float
    began: Stamp
    arrived: Stamp


@dataclass(frozen=True)
class Arrival:
    """Parameters: when the last of their versions was published, and when all of them were on the device."""

    published: float
    arrived: Stamp


@dataclass(frozen=True)
class ComputeInterval:
    """What a device computes without a wait in between."""

    launched: float  # when the host began to launch it
    start: Stamp
    end: Stamp
    parameters: Arrival | None  # that it waited for


@dataclass
class Span:
    """What a slot has a device compute: a micro-batch, or, of a backward stage, what its gradient sums need.

    A micro-batch is in several pieces where the stage's parameters were still on their way, a piece a layer.
    """

    iteration: int
    slot: Slot
    work: Work
    submission: Submission
    blocked: tuple[Blocked, ...]  # the worker's thread, since the span before
    begun: float  # the thread began to issue it
    issued: float  # and had issued it, and the windows of transfers that go with it
    copies: list[Copy] = field(default_factory=list)
    pieces: list[ComputeInterval] = field(default_factory=list)
    freed: list[Stamp] = field(default_factory=list)  # when the places of its outputs were free to be written
    embedded: float = -inf  # when the weights were published that the embedding of its iteration read

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
    """A board that knows when a number was published, and what the threads that ask for it were blocked by."""

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
        """When one of the last numbers was, or the key's constant."""
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
        """What the calling thread was blocked by since it last asked; it is watched from its first question on."""
        found = getattr(self._thread, "blocked", ())
        self._thread.blocked = []
        return tuple(found)


class Trace:
    """Spans that were issued, until somebody takes them. Thread-safe."""

    def __init__(self) -> None:
        self.board = WatchedBoard()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._submissions: dict[int, Submission] = {}

    def submit(self, iteration: int) -> None:
        """To be called by the caller's thread, before a worker has the iteration."""
        self._submissions[iteration] = Submission(time.perf_counter(), self.board.blocked())
        self._submissions.pop(iteration - KEPT, None)

    def begin(self, iteration: int, slot: Slot, work: Work) -> Span:
        """To be called by a worker's thread, which fills the span while it issues what it stands for."""
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
