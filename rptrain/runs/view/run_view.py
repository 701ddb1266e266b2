"""The state of a run for display: `RunView` reads what the trainer writes, and keeps what an interface shows.

    view = RunView(Path("runs/my"))  # reads all records; takes less than a second for 100,000 steps
    view.refresh()                   # reads new records; True if there are any
    view.state, view.step, view.total_steps, view.eta
    view.steps.points("loss", 200)   # for a plot; see series.COLUMNS for the names
    view.lanes                       # the current activity of each device, and its rates over the last seconds
    view.processes                   # the same of the other processes, if several train the run

A view belongs to one thread. `refresh` takes milliseconds and may be called a few times per second. If that is too
slow, another thread may read (`news`) and the owner add the result (`add`). Open a large run in a worker thread.
Missing files, incomplete last lines and records of unknown kinds are skipped.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rptrain.runs.records.events import (
    EVENTS,
    VALIDATION_LOSS,
    Evaluation,
    Event,
    Finished,
    Progress,
    Severity,
    from_fields,
)
from rptrain.runs.records.fields import known_fields, time_of, validator
from rptrain.runs.records.lanes import OptimizerState, Snapshot, StepNumbers
from rptrain.runs.records.loss_change import LossChange, finished_sentence, loss_change
from rptrain.runs.records.process import FOLDER, ProcessId
from rptrain.runs.records.reader import RECENT, News, Reader
from rptrain.runs.records.tail import LARGE
from rptrain.runs.records.timeline import Schedule, StepTimeline
from rptrain.runs.view.pace import REPORTS, Pace
from rptrain.runs.view.series import Steps
from rptrain.runs.view.training_time import TrainingTime
from rptrain.runs.view.usage import Usage
from rptrain.runs.view.values import Checkpoint, Death, LaneView, LogLine, MemoryUse, Score, lane_views, lowest
from rptrain.utils.units import format_loss

State = Literal[
    "new", "loading", "training", "paused", "saving", "evaluating", "exporting", "stopped", "failed", "finished", "dead"
]
ENDED = ("stopped", "failed", "finished", "dead")

KEPT_LINES = 1000  # lines of the log
WINDOW = 5.0  # seconds over which rates of devices are averaged
SILENT = 60.0  # seconds without a record after which a trainer on another machine counts as dead
SPREAD = 30.0  # seconds by which the starts of a run's processes, and the clocks of their machines, may differ
SAID = 2000  # characters of a message that the log keeps


class RunView:
    """The state of the run in `path`; the module's docstring shows its use. `large` is that of `Tail`. With `empty`,
    it shows only what `take` and `take_snapshot` add. With `brief`, it has only the newest snapshots, as for a list.

    If several processes train the run, the view is that of the first, except where something else is said, and has a
    view for each of the others. `rank` is the number of the process.

    Attributes for display, besides the properties below:
    `version`, `model`, `parameters`, `devices`: from the newest process that trained the run.
    `plan`: text; the stages in the first line, then one line per device about its work in a step.
    `staleness`: 1 if updates are one step late (async), 0 if not (sync), None if unknown.
    `steps`: the reported steps, a `Steps`. `skipped`: the number of them that did not change the weights.
    `usage`: speed, devices and memory over time, a `Usage`.
    `loss_scale`: of float16 runs. `places`: planned memory. `planned_bubble`: the planned idle share of a step.
    `schedule`: the simulated step of the plan; None in runs of versions that did not record it. `timeline`: when the
    devices computed in a recent step; None until it is known. `step_ended`: Unix time of the record of the last step.
    `floor_step`: the roofline time of a step: seconds of its arithmetic alone, with everything recomputed.
    `process_count`: the number of processes that train the run together, according to the newest one.
    `checkpoints`, `scores`, `samples`, `log`: oldest first. `samples` have `step`, `prompt` and `text`. `best`: the
    score with the lowest validation loss.
    `recent`: the last snapshots, oldest first.
    """

    def __init__(
        self, path: Path | str, *, large: int = LARGE, empty: bool = False, rank: int = 0, brief: bool = False
    ) -> None:
        self.path, self.rank = Path(path), rank
        self._reader = Reader(self.path, large, brief=brief)
        self._others: dict[int, RunView] = {}  # by rank; some may be of an earlier start
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
        self.step_ended: float | None = None
        self._planned_at = 0.0
        self.steps = Steps()
        self.usage = Usage()
        self.skipped = 0
        self.loss_scale: float | None = None
        self.checkpoints: list[Checkpoint] = []
        self.scores: list[Score] = []
        self.best: Score | None = None
        self._best_before: Score | None = None  # before the newest evaluation
        self.samples: list[Mapping[str, Any]] = []
        self.log: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self.recent: deque[Snapshot] = deque(maxlen=RECENT)
        self.began: float | None = None  # Unix time of the first process's start
        self.taken_up: float | None = None  # Unix time of the newest process's start
        self.last_event: float | None = None
        self._latest: StepNumbers | None = None  # from snapshots
        self._completed = 0  # the last step according to other records of the newest process
        self._average: float | None = None  # tokens per second of a process that has only warmed up
        self._first_step = 0.0  # the newest process started after this step
        self._pace = Pace()
        self.training_time = TrainingTime()
        self._ended: State | None = None
        self._death: Death | None = None  # of the process before the newest one
        self._failed: tuple[float, str] | None = None  # time and message
        self._told: State = "new"  # according to events
        if not empty:
            self.refresh()

    # ---- reading

    def refresh(self) -> bool:
        """Reads new records and adds them. Returns whether there were any."""
        return self.add(self.news())

    @property
    def whole(self) -> bool:
        """Whether it has all events, instead of a sample of them."""
        return self._reader.whole

    def news(self) -> Mapping[int, News]:
        """Reads new records without changing what the view shows. Another thread may call this, one at a time."""
        return self._reader.read()

    def add(self, news: Mapping[int, News]) -> bool:
        """Adds new records to the view. Returns whether there were any."""
        for rank, found in news.items():
            self.of_process(rank)._add(found)
        return bool(news)

    def _add(self, news: News) -> None:
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

    def of_process(self, rank: int) -> "RunView":
        """The view of a process, whether or not it trains the run now."""
        if rank == self.rank:
            return self
        if rank not in self._others:
            self._others[rank] = RunView(self.path / FOLDER / str(rank), empty=True, rank=rank)
        return self._others[rank]

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
            self._add_line(self.last_event or 0.0, "a record that cannot be read was skipped", "warning")

    def _take(self, name: str, known: Mapping[str, Any]) -> None:
        if name == "run_started":
            self.training_time.stop(known["trained"] if known.get("trained") is not None else self.trained)
            died = self._told != "new" and self._ended is None
            self._death = Death(self.process, self.step, self.last_seen) if died else None
        self.last_event = known["time"]
        if (take := getattr(self, f"_on_{name}", None)) is not None:
            take(known)
        if name != "step" or known["skipped"]:
            self._say(from_fields(EVENTS[name], known))

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Adds a snapshot, unless an earlier process wrote it."""
        if snapshot.time >= (self.taken_up or 0.0):
            self.recent.append(snapshot)
            if snapshot.last is not None:
                self._latest, self.step_ended = snapshot.last, snapshot.time
                self._pace.completed(snapshot.last.step, snapshot.time)
            if snapshot.timeline is not None and snapshot.time >= self._planned_at:
                self.timeline = snapshot.timeline

    # ---- state

    @property
    def now(self) -> Snapshot | None:
        """The newest snapshot; None if the run has ended."""
        return self.recent[-1] if self.recent and self._ended is None else None

    @property
    def state(self) -> State:
        """The current phase of the run, or how it ended. "dead": its process is gone without a final record."""
        if self._ended is not None:
            return self._ended
        if self._told == "new":
            return "new"
        if not self._alive():
            return "dead"
        now = self.now
        return self._told if now is None or self._told == "paused" else now.phase

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def step(self) -> int:
        """The last completed step according to the newest record that has it; 0 before the first."""
        saved = self.checkpoints[-1].step if self.checkpoints else 0
        return max(self._reported, saved, self._completed, 0 if self._latest is None else self._latest.step)

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
    def tokens_per_second(self) -> float | None:
        """Of the last steps of this process or, if the run has ended, the median of the last reports; None if
        unknown. Steps in which kernels were compiled do not count, and neither does the first one of a process.
        """
        latest = self.latest
        if self._told == "paused":
            return None
        if not self.ended:
            return None if latest is None or latest.step <= self._first_step else latest.tokens_per_second
        speeds = [speed for speed in self.steps.column("tokens_per_second")[-REPORTS:] if not isnan(speed)]
        return median(speeds) if speeds else None

    @property
    def average_tokens_per_second(self) -> float | None:
        """Of a run that ended before its speed was known: that of all steps, with the slow first ones; else None."""
        return self._average if self.ended and self.tokens_per_second is None else None

    @property
    def loss(self) -> float | None:
        """The last loss that is finite; None if there is none."""
        if (latest := self.latest) is not None and latest.loss is not None:
            return latest.loss
        return next((loss for loss in reversed(self.steps.column("loss")) if not isnan(loss)), None)

    @property
    def validation_loss(self) -> float | None:
        """The newest one that is finite; None if there is none."""
        losses = (score.score for score in reversed(self.scores) if score.name == VALIDATION_LOSS)
        return next((loss for loss in losses if loss is not None), None)

    @property
    def loss_change(self) -> LossChange | None:
        """How the training loss changed so far; None for less than two losses."""
        return self.steps.derived("loss", loss_change)

    @property
    def last_seen(self) -> float | None:
        """Unix time of the last record of any kind; None without one."""
        times = (self.last_event or 0.0, self.recent[-1].time if self.recent else 0.0)
        return max(times) or None

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
    def seconds_per_step(self) -> float | None:
        """The pace of the newest process since its start or the last pause; None if unknown."""
        return self._pace.seconds_per_step(self.steps, self._latest)

    @property
    def eta(self) -> float | None:
        """Seconds until the last step at the current pace; None if unknown or if the run has ended."""
        pace = self.seconds_per_step
        if pace is None or self.total_steps is None or self.ended:
            return None
        return pace * (self.total_steps - self.step)

    @property
    def share_of_floor(self) -> float | None:
        """The roofline time of a step (`floor_step`) as a share of the measured one. It may exceed 1."""
        pace = self.seconds_per_step
        return None if not pace or self.floor_step is None else self.floor_step / pace

    @property
    def lanes(self) -> tuple[LaneView, ...]:
        """A view of each device, in order; empty while no engine is open."""
        now = self.now
        if now is None or not now.lanes:
            return ()
        window = [shot for shot in self.recent if shot.time > now.time - WINDOW and len(shot.lanes) == len(now.lanes)]
        return lane_views(window, self.places)

    @property
    def bubble(self) -> float | None:
        """The average share of the last seconds in which the devices of all processes did not compute; None if
        unknown, and for as long after the end of the first step since the start or a pause.
        """
        now = self.now
        if now is None or self._told == "paused" or not self._pace.first_step_ended(now.time - WINDOW):
            return None
        lanes = [lane for view in (self, *self.processes) for lane in view.lanes]
        return 1 - sum(lane.busy_share for lane in lanes) / len(lanes) if lanes else None

    @property
    def optimizer(self) -> OptimizerState | None:
        return None if self.now is None else self.now.optimizer

    @property
    def host(self) -> MemoryUse | None:
        """The planned use of host memory. The actual use of the process is `now.process`."""
        return next((place for place in self.places if place.kind == "host memory"), None)

    # ---- several processes

    @property
    def processes(self) -> tuple["RunView", ...]:
        """The views of the other processes that train the run, by rank. A process is left out until it has records
        since the run's newest start.
        """
        since = (self.taken_up or 0.0) - SPREAD
        others = (self._others[rank] for rank in sorted(self._others) if rank < self.process_count)
        return tuple(view for view in others if view.taken_up is not None and view.taken_up >= since)

    @property
    def name(self) -> str:
        """The process, such as "process 1 on node-b"."""
        return f"process {self.rank}" + ("" if self.process is None else f" on {self.process.host}")

    @property
    def failure(self) -> str | None:
        """The error message of a failed run. Of several processes, the first that failed counts, and the message begins
        with its name unless it is the run's first process.
        """
        failed = [(view._failed[0], view) for view in (self, *self.processes) if view._failed is not None]
        if not failed:
            return None
        _, view = min(failed, key=lambda one: one[0])
        return view.own_failure if view is self else f"{view.name}: {view.own_failure}"

    @property
    def own_failure(self) -> str | None:
        """The error message of this process."""
        return None if self._failed is None else self._failed[1]

    @property
    def whole_log(self) -> Sequence[LogLine]:
        """The log with the warnings and errors of the other processes, each with the name of its process. What several
        processes say is there once.
        """
        if not (others := self.processes):
            return self.log
        lines, said = list(self.log), {line.text for line in self.log}
        for view in others:
            for line in view.log:
                if line.kind != "info" and line.time >= (view.taken_up or 0.0) and line.text not in said:
                    said.add(line.text)
                    lines.append(replace(line, text=f"{view.name}: {line.text}"))
        return sorted(lines, key=lambda line: line.time)

    # ---- records

    def _alive(self) -> bool:
        if self.process is not None and self.process.here:
            return self.process.alive
        return time.time() - (self.last_seen or 0.0) < SILENT

    def _say(self, event: Event) -> None:
        change = self.loss_change if isinstance(event, Finished) else None
        sentence = finished_sentence(event.step, change) if isinstance(event, Finished) else event.sentence()
        if sentence is None:
            return
        if isinstance(event, Evaluation) and self._is_improved():
            sentence += ", the best so far"
        self._add_line(event.time, sentence, event.severity)
        if change is not None and (hint := change.hint(self.step)) is not None:
            self._add_line(event.time, hint, "warning")

    def _is_improved(self) -> bool:
        """Whether the newest validation loss is lower than all before it, as far as the shown digits tell."""
        if self.best is None or self.best is not self.scores[-1]:
            return False
        return self._best_before is None or format_loss(self._best_before.score) != format_loss(self.best.score)

    def _add_line(self, time: float, text: str, kind: Severity) -> None:
        self.log.append(LogLine(time, text if len(text) <= SAID else f"{text[:SAID]} …", kind))

    def _on_run_started(self, record: Mapping[str, Any]) -> None:
        self.version, self.model, self.parameters = record["version"], record["model"], record["parameters"]
        self.devices = record["devices"]
        if self.began is not None:  # the snapshots are those of the process before
            self.usage.keep(self.recent)
        self.began = self.began or record["time"]
        self.taken_up = record["time"]
        self.training_time.begin(record["time"])
        self._latest = self.step_ended = None
        self._completed = 0
        self._first_step = self._reported
        self._pace.restart(self._reported)
        self.process = None
        self._failed = self._ended = None
        self._told = "loading"
        self.recent.clear()

    def _on_process_started(self, record: Mapping[str, Any]) -> None:
        places = validator(tuple[MemoryUse, ...])(record["memory"])
        self.process = ProcessId(record["host"], record["pid"], record["birth"])
        self.total_steps, self.staleness = record["total_steps"], record["staleness"]
        self.process_count, self.places = record["processes"], places
        if self._death is not None and self.rank == 0:
            self._add_line(record["time"], self._death.before(self.process), "warning")

    def _on_plan(self, record: Mapping[str, Any]) -> None:
        self.plan = record["lines"]

    def _on_estimated(self, record: Mapping[str, Any]) -> None:
        self.planned_bubble, self.floor_step = record["bubble"], record["floor_seconds"]
        self.schedule, self._planned_at = record["schedule"], record["time"]
        self.timeline = None  # of the plan before

    def _on_step(self, record: Mapping[str, Any]) -> None:
        self.steps.append({**record, "tokens_per_second": None} if record["warm_up"] else record)
        self._average = record["tokens_per_second"] if record["warm_up"] else None
        self._told = "training"
        if not self.training_time.counts:  # of a long run, the end of the pause was not read
            self.training_time.begin(record["time"])
        self.skipped += record["skipped"]
        self._pace.completed(record["step"], record["time"])

    def _on_progress(self, record: Mapping[str, Any]) -> None:
        self.usage.append(Progress(**record))
        self._completed = record["step"]

    def _on_loss_scale(self, record: Mapping[str, Any]) -> None:
        self.loss_scale = record["scale"]

    def _on_evaluation(self, record: Mapping[str, Any]) -> None:
        score = Score(record["time"], record["step"], record["name"], record["score"], record.get("tasks", {}))
        self.scores.append(score)
        self._best_before, self.best = self.best, lowest((*filter(None, [self.best]), score))

    def _on_sample(self, record: Mapping[str, Any]) -> None:
        self.samples.append({name: record[name] for name in ("step", "prompt", "text")})

    def _on_checkpoint_saved(self, record: Mapping[str, Any]) -> None:
        self.checkpoints.append(Checkpoint(record["time"], record["step"], record["path"]))

    def _on_resumed(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        self.steps.keep(step)
        self._latest, self._completed = None, step
        self._pace.restart(step)
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.step <= step]
        self.scores = [score for score in self.scores if score.step <= step]
        self.best = lowest(self.scores)
        self.samples = [sample for sample in self.samples if sample["step"] <= step]
        self._first_step = step

    def _on_paused(self, record: Mapping[str, Any]) -> None:
        self._told = "paused"
        self.training_time.stop(self.training_time.until(record["time"]))

    def _on_continued(self, record: Mapping[str, Any]) -> None:
        self._told = "training"
        self.training_time.begin(record["time"])
        self._pace.restart(record["step"])

    def _on_stopped(self, record: Mapping[str, Any]) -> None:
        self._ended = "stopped"

    def _on_finished(self, record: Mapping[str, Any]) -> None:
        self._ended = "finished"

    def _on_failed(self, record: Mapping[str, Any]) -> None:
        self._ended, self._failed = "failed", (record["time"], record["message"])


def _known(value: float | None) -> float | None:
    return None if value is None or isnan(value) else value
