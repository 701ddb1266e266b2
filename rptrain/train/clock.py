"""Clocks of training: how long it ran, and how long single steps took."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median


class Clock:
    """Measures how long training ran, without pauses."""

    def __init__(self) -> None:
        self._seconds = 0.0  # since the last lap, until `running` was entered
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

    def lap(self) -> float:
        """The seconds since the last lap. Within `running`."""
        now = time.perf_counter()
        seconds = self._seconds + now - self._since
        self._seconds, self._since = 0.0, now
        return seconds


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
