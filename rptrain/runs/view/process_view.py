"""The state of one of a run's processes, from its records."""

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rptrain.runs.records.events import EVENTS, Evaluation, Event, Finished, Progress, from_fields
from rptrain.runs.records.fields import known_fields, time_of, validator
from rptrain.runs.records.lanes import OptimizerState, Snapshot, StepNumbers
from rptrain.runs.records.loss_change import LossChange, finished_sentence, loss_change
from rptrain.runs.records.process import ProcessId
from rptrain.runs.records.reader import RECENT, News
from rptrain.runs.records.timeline import Schedule, StepTimeline
from rptrain.runs.view.log import Log
from rptrain.runs.view.results import Results
from rptrain.runs.view.step_progress import StepProgress
from rptrain.runs.view.training_time import TrainingTime
from rptrain.runs.view.usage import Usage
from rptrain.runs.view.values import Death, LaneView, MemoryUse, lane_views

State = Literal[
    "new", "loading", "training", "paused", "saving", "evaluating", "exporting", "stopped", "failed", "finished", "dead"
]
ENDED = ("stopped", "failed", "finished", "dead")

WINDOW = 5.0  # seconds over which rates of devices are averaged
SILENT = 60.0  # seconds without a record after which a trainer on another machine counts as dead


class ProcessView:
    """The state of the process whose records are in `path`. `rank` is its number among the run's processes.

    Attributes for display, besides the properties below:
    `version`, `model`, `parameters`, `devices`: from the newest process that trained the run.
    `plan`: text; the stages in the first line, then one line per device about its work in a step.
    `staleness`: 1 if updates are one step late (async), 0 if not (sync), None if unknown.
    `progress`: the steps, a `StepProgress`; `steps` are its reported ones.
    `results`: checkpoints, scores and samples, a `Results`. `log`: a `Log`.
    `usage`: speed, devices and memory over time, a `Usage`.
    `loss_scale`: of float16 runs. `places`: planned memory. `planned_bubble`: the planned idle share of a step.
    `schedule`: the simulated step of the plan; None in runs of versions that did not record it. `timeline`: when the
    devices computed in a recent step; None until it is known.
    `floor_step`: the roofline time of a step: seconds of its arithmetic alone, with everything recomputed.
    `process_count`: the number of processes that train the run together, according to the newest one.
    `recent`: the last snapshots, oldest first.
    `began`, `taken_up`: Unix times at which the first and the newest process started.
    `failed`: the Unix time and the message of an error that ended the newest process.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path, self.rank = path, rank
        self.version = self.model = ""
        self.parameters = 0
        self.devices: tuple[str, ...] = ()
        self.plan: tuple[str, ...] = ()
        self.total_steps: int | None = None
        self.staleness: int | None = None
        self.process: ProcessId | None = None
        self.process_count = 1
        self.places: tuple[MemoryUse, ...] = ()
        self.planned_bubble: float | None = None
        self.floor_step: float | None = None
        self.schedule: Schedule | None = None
        self.timeline: StepTimeline | None = None
        self._planned_at = 0.0
        self.progress = StepProgress()
        self.steps = self.progress.steps
        self.results = Results()
        self.log = Log()
        self.usage = Usage()
        self.loss_scale: float | None = None
        self.recent: deque[Snapshot] = deque(maxlen=RECENT)
        self.began: float | None = None
        self.taken_up: float | None = None
        self.last_event: float | None = None
        self.training_time = TrainingTime()
        self.failed: tuple[float, str] | None = None
        self._ended: State | None = None
        self._death: Death | None = None  # of the process before the newest one
        self._state: State = "new"  # according to events

    # ---- adding records

    def take_news(self, news: News) -> None:
        """Adds the snapshots of a process before the start of the next one, which says how the one before ended."""
        snapshots = deque(news.snapshots)
        for record in news.records:
            if record.get("event") == "run_started":
                start = time_of(record, None) or 0.0
                while snapshots and snapshots[0].time < start:
                    self.take_snapshot(snapshots.popleft())
            self.take(record)
        for snapshot in snapshots:
            self.take_snapshot(snapshot)

    def take(self, record: Mapping[str, Any]) -> None:
        """Adds a record of events.jsonl, as parsed from JSON. Of unknown kinds only the time is kept."""
        name = str(record.get("event"))
        if name not in EVENTS:
            self.last_event = time_of(record, self.last_event)
            return
        try:
            self._take(name, known_fields(record, EVENTS[name]))
        except (KeyError, TypeError, ValueError):  # a sentence of missing fields is a TypeError
            self.last_event = time_of(record, self.last_event)
            self.log.add(self.last_event or 0.0, "a record that cannot be read was skipped", "warning")

    def _take(self, name: str, known: Mapping[str, Any]) -> None:
        """Gives a record to each part that has a method for it."""
        if name == "run_started":
            self.training_time.stop(known["trained"] if known.get("trained") is not None else self.trained)
            died = self._state != "new" and self._ended is None
            self._death = Death(self.process, self.step, self.last_seen) if died else None
        self.last_event = known["time"]
        for part in (self, self.progress, self.results):
            if (take := getattr(part, f"on_{name}", None)) is not None:
                take(known)
        if name != "step" or known["skipped"]:
            self._say(from_fields(EVENTS[name], known))

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Adds a snapshot, unless an earlier process wrote it."""
        if snapshot.time >= (self.taken_up or 0.0):
            self.recent.append(snapshot)
            self.progress.take_snapshot(snapshot)
            if snapshot.timeline is not None and snapshot.time >= self._planned_at:
                self.timeline = snapshot.timeline

    def _say(self, event: Event) -> None:
        change = self.loss_change if isinstance(event, Finished) else None
        sentence = finished_sentence(event.step, change) if isinstance(event, Finished) else event.sentence()
        if sentence is None:
            return
        if isinstance(event, Evaluation) and self.results.is_improved:
            sentence += ", the best so far"
        self.log.add(event.time, sentence, event.severity)
        if change is not None and (hint := change.hint(self.step)) is not None:
            self.log.add(event.time, hint, "warning")

    def on_run_started(self, record: Mapping[str, Any]) -> None:
        self.version, self.model, self.parameters = record["version"], record["model"], record["parameters"]
        self.devices = record["devices"]
        if self.began is not None:  # the snapshots are those of the process before
            self.usage.keep(self.recent)
        self.began = self.began or record["time"]
        self.taken_up = record["time"]
        self.training_time.begin(record["time"])
        self.process = None
        self.failed = self._ended = None
        self._state = "loading"
        self.recent.clear()

    def on_process_started(self, record: Mapping[str, Any]) -> None:
        places = validator(tuple[MemoryUse, ...])(record["memory"])
        self.process = ProcessId(record["host"], record["pid"], record["birth"])
        self.total_steps, self.staleness = record["total_steps"], record["staleness"]
        self.process_count, self.places = record["processes"], places
        if self._death is not None and self.rank == 0:
            self.log.add(record["time"], self._death.before(self.process), "warning")

    def on_plan(self, record: Mapping[str, Any]) -> None:
        self.plan = record["lines"]

    def on_estimated(self, record: Mapping[str, Any]) -> None:
        self.planned_bubble, self.floor_step = record["bubble"], record["floor_seconds"]
        self.schedule, self._planned_at = record["schedule"], record["time"]
        self.timeline = None  # of the plan before

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.progress.add(record)
        self._state = "training"
        if not self.training_time.counts:  # of a long run, the end of the pause was not read
            self.training_time.begin(record["time"])

    def on_progress(self, record: Mapping[str, Any]) -> None:
        self.usage.append(Progress(**record))

    def on_loss_scale(self, record: Mapping[str, Any]) -> None:
        self.loss_scale = record["scale"]

    def on_paused(self, record: Mapping[str, Any]) -> None:
        self._state = "paused"
        self.training_time.stop(self.training_time.until(record["time"]))

    def on_continued(self, record: Mapping[str, Any]) -> None:
        self._state = "training"
        self.training_time.begin(record["time"])

    def on_stopped(self, record: Mapping[str, Any]) -> None:
        self._ended = "stopped"

    def on_finished(self, record: Mapping[str, Any]) -> None:
        self._ended = "finished"

    def on_failed(self, record: Mapping[str, Any]) -> None:
        self._ended, self.failed = "failed", (record["time"], record["message"])

    # ---- state

    @property
    def name(self) -> str:
        """The process, such as "process 1 on node-b"."""
        return f"process {self.rank}" + ("" if self.process is None else f" on {self.process.host}")

    @property
    def now(self) -> Snapshot | None:
        """The newest snapshot; None if the run has ended."""
        return self.recent[-1] if self.recent and self._ended is None else None

    @property
    def state(self) -> State:
        """The current phase of the run, or how it ended. "dead": its process is gone without a final record."""
        if self._ended is not None:
            return self._ended
        if self._state == "new":
            return "new"
        if not self._alive():
            return "dead"
        now = self.now
        return self._state if now is None or self._state == "paused" else now.phase

    def _alive(self) -> bool:
        if self.process is not None and self.process.here:
            return self.process.alive
        return time.time() - (self.last_seen or 0.0) < SILENT

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_paused(self) -> bool:
        """Whether the last event was a pause, also in a process that has ended since."""
        return self._state == "paused"

    @property
    def own_failure(self) -> str | None:
        """The error message of this process."""
        return None if self.failed is None else self.failed[1]

    @property
    def last_seen(self) -> float | None:
        """Unix time of the last record of any kind; None without one."""
        times = (self.last_event or 0.0, self.recent[-1].time if self.recent else 0.0)
        return max(times) or None

    # ---- steps

    @property
    def step(self) -> int:
        """The last completed step according to the newest record that has it; 0 before the first."""
        return max(self.progress.step, self.results.saved_step)

    @property
    def latest(self) -> StepNumbers | None:
        """The numbers of the last completed step; None before the first."""
        return self.progress.latest

    @property
    def loss(self) -> float | None:
        """The last loss that is finite; None if there is none."""
        return self.progress.loss

    @property
    def loss_change(self) -> LossChange | None:
        """How the training loss changed so far; None for less than two losses."""
        return self.steps.derived("loss", loss_change)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the last steps of this process or, if the run has ended, the median of the last reports; None if
        unknown. Steps in which kernels were compiled do not count, and neither does the first one of a process.
        """
        if self.is_paused:
            return None
        return self.progress.median_speed if self.ended else self.progress.current_speed

    @property
    def average_tokens_per_second(self) -> float | None:
        """Of a run that ended before its speed was known: that of all steps, with the slow first ones; else None."""
        return self.progress.average if self.ended and self.tokens_per_second is None else None

    # ---- time

    def seconds(self, now: float) -> float | None:
        """How long processes trained the run, in seconds, without pauses and the time between processes; None if it has
        not begun. `now`: Unix time, which counts for a run that has not ended.
        """
        if self.taken_up is None:
            return None
        return self.trained if self.ended else self.training_time.until(now)

    @property
    def trained(self) -> float:
        """The same up to the last record; 0 for a run that has not begun."""
        return self.training_time.until(self.last_seen or 0.0)

    @property
    def eta(self) -> float | None:
        """Seconds until the last step at the current pace; None if unknown or if the run has ended."""
        pace = self.progress.seconds_per_step
        if pace is None or self.total_steps is None or self.ended:
            return None
        return pace * (self.total_steps - self.step)

    @property
    def share_of_floor(self) -> float | None:
        """The roofline time of a step (`floor_step`) as a share of the measured one. It may exceed 1."""
        pace = self.progress.seconds_per_step
        return None if not pace or self.floor_step is None else self.floor_step / pace

    # ---- devices

    @property
    def lanes(self) -> tuple[LaneView, ...]:
        """A view of each device, in order; empty while no engine is open."""
        now = self.now
        if now is None or not now.lanes:
            return ()
        window = [shot for shot in self.recent if shot.time > now.time - WINDOW and len(shot.lanes) == len(now.lanes)]
        return lane_views(window, self.places)

    @property
    def optimizer(self) -> OptimizerState | None:
        return None if self.now is None else self.now.optimizer

    @property
    def host(self) -> MemoryUse | None:
        """The planned use of host memory. The actual use of the process is `now.process`."""
        return next((place for place in self.places if place.kind == "host memory"), None)
