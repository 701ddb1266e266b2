"""How far a run is: its reported steps, the numbers of the newest one, and the pace."""

from collections.abc import Mapping
from math import isnan
from statistics import median
from typing import Any

from rptrain.runs.records.lanes import Snapshot, StepNumbers
from rptrain.runs.view.pace import REPORTS, Pace
from rptrain.runs.view.series import Steps


class StepProgress:
    """`steps`: the reported steps. `skipped`: the number of them that did not change the weights. `completed`: the last
    step according to records of the newest process that have no numbers of it. `step_ended`: Unix time of the record of
    the last step. `average`: tokens per second of a process that has only warmed up.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.skipped = 0
        self.completed = 0
        self.step_ended: float | None = None
        self.average: float | None = None
        self._latest: StepNumbers | None = None  # from snapshots
        self._first_step = 0.0  # the newest process started after this step
        self._pace = Pace()

    def on_run_started(self, record: Mapping[str, Any]) -> None:
        self._latest = self.step_ended = None
        self.completed = 0
        self._first_step = self._reported
        self._pace.restart(self._reported)

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds a `step` record."""
        self.steps.append({**record, "tokens_per_second": None} if record["warm_up"] else record)
        self.average = record["tokens_per_second"] if record["warm_up"] else None
        self.skipped += record["skipped"]
        self._pace.completed(record["step"], record["time"])

    def on_progress(self, record: Mapping[str, Any]) -> None:
        self.completed = record["step"]

    def on_resumed(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        self.steps.keep(step)
        self._latest, self.completed = None, step
        self._pace.restart(step)
        self._first_step = step

    def on_continued(self, record: Mapping[str, Any]) -> None:
        self._pace.restart(record["step"])

    def take_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.last is not None:
            self._latest, self.step_ended = snapshot.last, snapshot.time
            self._pace.completed(snapshot.last.step, snapshot.time)

    @property
    def step(self) -> int:
        """The last completed step according to the newest record that has it; 0 before the first."""
        return max(self._reported, self.completed, 0 if self._latest is None else self._latest.step)

    @property
    def _reported(self) -> int:
        """The last step with a record of its own, which not every step has; 0 before the first."""
        return int(self.steps.last("step") or 0)

    @property
    def latest(self) -> StepNumbers | None:
        """The numbers of the last completed step; None before the first."""
        if self._latest is not None and self._latest.step >= self._reported:
            return self._latest
        if not len(self.steps):
            return None
        names = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
        loss, rate, norm, speed = (self.steps.last(name) for name in names)
        return StepNumbers(self._reported, _known(loss), rate or 0.0, _known(norm), _known(speed))

    @property
    def loss(self) -> float | None:
        """The last loss that is finite; None if there is none."""
        if (latest := self.latest) is not None and latest.loss is not None:
            return latest.loss
        return next((loss for loss in reversed(self.steps.column("loss")) if not isnan(loss)), None)

    @property
    def current_speed(self) -> float | None:
        """Tokens per second of the last steps of the newest process; None before its second step."""
        latest = self.latest
        return None if latest is None or latest.step <= self._first_step else latest.tokens_per_second

    @property
    def median_speed(self) -> float | None:
        """The median tokens per second of the last reports; None without any."""
        speeds = [speed for speed in self.steps.column("tokens_per_second")[-REPORTS:] if not isnan(speed)]
        return median(speeds) if speeds else None

    @property
    def seconds_per_step(self) -> float | None:
        """The pace of the newest process since its start or the last pause; None if unknown."""
        return self._pace.seconds_per_step(self.steps, self._latest)

    def first_step_ended(self, time: float) -> bool:
        """Whether a step since the newest start or pause had been completed at a Unix time."""
        return self._pace.first_step_ended(time)


def _known(value: float | None) -> float | None:
    return None if value is None or isnan(value) else value
