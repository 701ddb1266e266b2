"""Clocks of training: how long it ran, how fast the last steps were, and how long single steps took."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

STEPS, SECONDS = 4, 5.0  # the speed is an average of at least these


class Clock:
    """Measures how long training ran, without pauses."""

    def __init__(self) -> None:
        self._seconds = 0.0  # until `running` was entered
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within `running`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """How long training ran so far. Within `running`."""
        return self._seconds + time.perf_counter() - self._since


class Throughput:
    """Tokens per second, by a clock, without the steps in which the run warms up.

    With async updates (`asynchronous`), two short steps may run at once and end one right after the other. So the speed
    is an average of the last STEPS steps or more, and of the last SECONDS seconds or more, as far as so many were
    counted; of fewer, it is an average of pairs.
    """

    def __init__(self, clock: Clock, *, asynchronous: bool = False) -> None:
        self._clock, self._least = clock, 1 + asynchronous
        self._ends = deque([(0.0, 0)])  # seconds and tokens of the steps that count, at the ends of the last ones
        self._lap = 0.0, 0  # the same at the last lap
        self._left_out = 0.0  # seconds of the steps that do not count
        self._tokens = 0  # of all steps

    def finished(self, tokens: int, *, warm_up: bool = False) -> float | None:
        """A step with these tokens has ended. Returns the speed; None until enough steps were counted.

        `warm_up`: it does not count, because kernels were compiled meanwhile, for example.
        """
        self._tokens += tokens
        ends, seconds = self._ends, self._clock.seconds - self._left_out
        if warm_up:
            self._left_out += seconds - ends[-1][0]
            return self._speed()
        ends.append((seconds, ends[-1][1] + tokens))
        while len(ends) > STEPS + 1 and seconds - ends[1][0] >= SECONDS:
            ends.popleft()
        return self._speed()

    def lap(self) -> float | None:
        """The speed, as an average of all steps that were counted since the last lap."""
        before, self._lap = self._lap, self._ends[-1]
        speed = self._speed()
        return speed if speed is None or before >= self._ends[0] else _speed(before, self._lap)

    def average(self) -> float:
        """The tokens per second of all steps so far, with those in which the run has warmed up."""
        return self._tokens / self._clock.seconds

    def _speed(self) -> float | None:
        counted = len(self._ends) - 1
        if counted < self._least:
            return None
        first = counted % self._least if counted < STEPS else 0
        return _speed(self._ends[first], self._ends[-1])


def _speed(start: tuple[float, int], end: tuple[float, int]) -> float:
    return (end[1] - start[1]) / (end[0] - start[0])


class StepTimes:
    """Durations of the last steps. With async updates a step runs while the previous one ends, so a duration is the
    time between the ends of both.

    The first step has none, and neither have the steps before and after an interruption.
    """

    def __init__(self, count: int) -> None:
        self._seconds: deque[float] = deque(maxlen=count)
        self._ended: float | None = None  # the previous step, unless it was interrupted

    def finished(self, *, counts: bool = True) -> float | None:
        """A step has ended. Returns its duration, if it has one. A short step does not count for the median."""
        now, before = time.perf_counter(), self._ended
        self._ended = now
        if before is None:
            return None
        if counts:
            self._seconds.append(now - before)
        return now - before

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Around the end of the step that runs and what follows it before the next step is started."""
        self._ended = None
        try:
            yield
        finally:
            self._ended = None

    @property
    def median(self) -> float | None:
        """None if no step has a duration."""
        return median(self._seconds) if self._seconds else None
