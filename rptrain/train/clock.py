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
    """Tokens per second, by a clock.

    Two short steps may run at once, with async updates, and end one right after the other. So the speed is always an
    average of the last STEPS steps or more, and of the last SECONDS seconds or more, as far as training ran so long.
    The first step, which may compile kernels, counts only until STEPS others have ended.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends = deque([(0.0, 0)])  # seconds and tokens so far, at the ends of the last steps
        self._lap = 0.0, 0  # the same at the last lap
        self._with_first = True  # whether the speed includes the first step

    def finished(self, tokens: int) -> float:
        """A step with these tokens has ended. Returns the speed."""
        ends, now = self._ends, self._clock.seconds
        ends.append((now, ends[-1][1] + tokens))
        while len(ends) > STEPS + 1 and (self._with_first or now - ends[1][0] >= SECONDS):
            ends.popleft()
            self._with_first = False
        return _speed(ends[0], ends[-1])

    def lap(self) -> float:
        """The speed, as an average of all steps since the last lap."""
        before, self._lap = self._lap, self._ends[-1]
        return _speed(min(before, self._ends[0]), self._lap)


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

    def finished(self) -> float | None:
        """A step has ended. Returns its duration, if it has one."""
        now, before = time.perf_counter(), self._ended
        self._ended = now
        if before is None:
            return None
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
