"""The pace of a run since its newest process began or a pause ended: earlier times and the first step do not count."""

from rptrain.runs.records.lanes import StepNumbers
from rptrain.runs.view.series import Steps

REPORTS = 50  # reported steps over which the pace is averaged
SHORTEST = 2.0  # seconds from which a pace is known: two short steps may end together, and the first ones are slow


class Pace:
    def __init__(self) -> None:
        self._after = 0.0  # a step
        self._first_ended: float | None = None  # Unix time of the end of the step after it

    def restart(self, step: float) -> None:
        """A process began after `step`, or a pause ended."""
        self._after, self._first_ended = step, None

    def completed(self, step: float, time: float) -> None:
        """A step was completed, according to a record with this Unix time."""
        if self._first_ended is None and step > self._after:
            self._first_ended = time

    def first_step_ended(self, time: float) -> bool:
        """Whether a step had been completed at a Unix time, so that later times do not include the slow start."""
        return self._first_ended is not None and self._first_ended <= time

    def seconds_per_step(self, steps: Steps, latest: StepNumbers | None) -> float | None:
        """The average over the last reports; before the second one the duration of the `latest` step. None until either
        is known, and while these steps took less than SHORTEST seconds together.
        """
        numbers, times = steps.column("step"), steps.column("time")
        first = max(steps.since(self._after), len(numbers) - REPORTS)
        if len(numbers) - first >= 2:
            count, seconds = numbers[-1] - numbers[first], times[-1] - times[first]
        else:
            count, seconds = 1.0, latest.seconds if latest is not None and latest.step > self._after else None
        return seconds / count if seconds and seconds >= SHORTEST else None
