"""The causes of idle time: each gap before a computation is divided among the things that the computation waited for.

A computation begins when the host has launched it, its inputs and its parameters have arrived, and the buffers of its
outputs are free. **The condition that was met last decides**, and the gap is divided along its history:

- the launch: the host's time, up to the launch;
- an input: the host's time, until its copy was issued; "producers", until its producer had sent it to the host and the
  copy could begin; "activations", until it had arrived;
- parameters: "optimizer", until the last of their versions was published; "parameters", until they had arrived;
- a free buffer: "activations", until its last output had been downloaded.

The embedding computes the first inputs of an iteration and waits for its weights too: until these were published,
"producers" is "optimizer".

The rest of the gap, when everything was ready, is "gradients" before a computation that also waits for copies of
gradients, and otherwise "other", the overhead of the device.

The host's time is "boundary" until the iteration was submitted, or "optimizer" while the caller waited for a step;
after that, it is the cause that blocked the worker's thread, or "launch" while nothing blocked it.

All times are in seconds on one clock. A computation that is slow because its own launches are late counts as busy; the
share of launches shows this case (`rptrain/bench/timeline.py`).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

Cause = Literal["parameters", "activations", "producers", "optimizer", "gradients", "launch", "boundary", "other"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
Step = tuple[float, Cause | None]  # end of a part of the history, and its cause; None: the host's time


@dataclass(frozen=True)
class Interval:
    """An interval of idle time with one cause."""

    cause: Cause
    start: float
    end: float


@dataclass(frozen=True)
class Input:
    """The times when the copy of an input was issued, could begin, and had arrived."""

    issued: float
    began: float
    arrived: float

    @property
    def way(self) -> tuple[Step, ...]:
        return (self.issued, None), (self.began, "producers"), (self.arrived, "activations")


@dataclass(frozen=True)
class TimedComputation:
    """A computation of a device without a wait in between, and the times when its requirements were met."""

    name: str
    start: float
    end: float
    submitted: float  # when its iteration was submitted
    launched: float
    inputs: tuple[Input, ...] = ()  # in the order of their copies
    parameters: tuple[float, float] | None = None  # when the last version was published, and when all had arrived
    freed: float | None = None  # when the buffers of its outputs were free
    embedded: float = -inf  # when the weights of its iteration's embedding were published
    rest: Cause = "other"


class Host:
    """The intervals in which a device's launching thread and the engine's caller were blocked: ordered and disjoint."""

    def __init__(self, blocked: Sequence[Interval] = (), caller: Sequence[Interval] = ()) -> None:
        self.blocked, self.caller = blocked, caller
        self._blocked, self._caller = ([interval.end for interval in of] for of in (blocked, caller))

    def time(self, start: float, end: float, submitted: float) -> Iterator[Interval]:
        """The host's time from `start` to `end`, for a computation of an iteration submitted at `submitted`."""
        middle = min(max(submitted, start), end)
        yield from _overlaid(start, middle, "boundary", self.caller, self._caller)
        yield from _overlaid(middle, end, "launch", self.blocked, self._blocked)

    def blocked_for(self, start: float, end: float) -> float:
        """Seconds that the thread was blocked between `start` and `end`."""
        found = _overlaid(start, end, "launch", self.blocked, self._blocked)
        return sum(interval.end - interval.start for interval in found if interval.cause != "launch")


@dataclass(frozen=True)
class Usage:
    """The use of a device's time, in seconds: `busy` and the causes of `idle` add up to `total`."""

    total: float
    busy: float
    idle: dict[Cause, float]


def usage(computations: Sequence[TimedComputation], host: Host, window: tuple[float, float]) -> Usage:
    total, idle = window[1] - window[0], dict.fromkeys(CAUSES, 0.0)
    for gap in gaps(computations, host, window):
        idle[gap.cause] += gap.end - gap.start
    return Usage(total, total - sum(idle.values()), idle)


def gaps(computations: Sequence[TimedComputation], host: Host, window: tuple[float, float]) -> list[Interval]:
    """All time in the window without computation, in order. Time after the last computation is "boundary"."""
    found: list[Interval] = []
    at, stop = window
    for computation in computations:
        if at >= stop:
            break
        if computation.start > at:
            parts = _optimized(_divided(at, computation, host), computation.embedded)
            found += [Interval(part.cause, part.start, min(part.end, stop)) for part in parts if part.start < stop]
        at = max(at, computation.end)
    if at < stop:
        found.append(Interval("boundary", at, stop))
    return found


def _divided(start: float, computation: TimedComputation, host: Host) -> Iterator[Interval]:
    """Divides the gap from `start` to the computation."""
    ways: list[tuple[Step, ...]] = [((computation.launched, None),)]
    if computation.inputs:
        ways.append(tuple(step for copy in computation.inputs for step in copy.way))
    if computation.parameters is not None:
        published, arrived = computation.parameters
        ways.append(((published, "optimizer"), (arrived, "parameters")))
    if computation.freed is not None:
        ways.append(((computation.freed, "activations"),))
    decisive = max(ways, key=lambda way: way[-1][0])
    steps: tuple[Step, ...] = (*decisive, (computation.start, computation.rest))
    at = start
    for until, cause in steps:
        end = min(max(until, at), computation.start)
        if cause is None:
            yield from host.time(at, end, computation.submitted)
        elif end > at:
            yield Interval(cause, at, end)
        at = max(at, end)


def _optimized(parts: Iterable[Interval], embedded: float) -> Iterator[Interval]:
    """Replaces "producers" by "optimizer" before the embedding has its weights."""
    for part in parts:
        if part.cause != "producers" or part.start >= embedded:
            yield part
            continue
        yield Interval("optimizer", part.start, min(part.end, embedded))
        if part.end > embedded:
            yield Interval("producers", embedded, part.end)


def _overlaid(
    start: float, end: float, otherwise: Cause, intervals: Sequence[Interval], ends: Sequence[float]
) -> Iterator[Interval]:
    """The time from `start` to `end`, divided into the given intervals, and `otherwise` between them."""
    if end <= start:
        return
    at = start
    for index in range(bisect_right(ends, start), len(intervals)):
        interval = intervals[index]
        if interval.start >= end:
            break
        if interval.start > at:
            yield Interval(otherwise, at, interval.start)
        yield Interval(interval.cause, max(at, interval.start), min(interval.end, end))
        at = min(interval.end, end)
    if end > at:
        yield Interval(otherwise, at, end)
