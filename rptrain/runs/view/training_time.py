"""How long processes have trained a run, in seconds, without pauses and the time between processes."""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf


class TrainingTime:
    """Times are Unix times."""

    def __init__(self) -> None:
        self._before = 0.0  # seconds before `_since`
        self._since: float | None = None  # None while no process trains
        self._starts: list[tuple[float, float]] = []  # when training began or continued, and the seconds before that

    @property
    def counts(self) -> bool:
        """Whether a process trains, and is not paused."""
        return self._since is not None

    @property
    def starts(self) -> Sequence[float]:
        """When processes began to train the run and pauses ended, of a sample of a long run only some."""
        return [time for time, _ in self._starts]

    def begin(self, time: float) -> None:
        self._since = time
        self._starts.append((time, self._before))

    def stop(self, seconds: float) -> None:
        """Training stopped when it had lasted so long."""
        self._before, self._since = seconds, None

    def until(self, time: float) -> float:
        """If nothing happens between the last call of `begin` or `stop` and a time."""
        return self._before + (0.0 if self._since is None else max(time - self._since, 0.0))

    def at(self, time: float) -> float:
        """At any time in the past. A sample of a long run may lack starts."""
        if not self._starts:
            return 0.0
        index = bisect_right(self._starts, (time, inf))
        started, before = self._starts[max(index - 1, 0)]
        later = self._starts[index][1] if 0 < index < len(self._starts) else inf if self.counts else self._before
        return min(before + max(time - started, 0.0), later)
