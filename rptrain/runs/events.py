"""Event records of a run (`events.jsonl`), and its progress line."""

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import timedelta
from os import SEEK_END
from pathlib import Path
from time import time as now
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from rptrain.runs.line_file import LineFile
from rptrain.runs.records import Bool, Float, Int, UnixTime
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_ROWS = 8  # of the data that a sentence names
SCHEMA = 1  # of every record; within a schema, records and fields at a record's end are only added
_TAIL = 4096  # bytes, more than the records that end a run need

Severity = Literal["info", "warning", "error"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A record: a JSON line with `schema`, `event` (the name) and the fields; NaN and infinities are null."""

    time: UnixTime = field(default_factory=now)
    severity: ClassVar[Severity] = "info"

    def sentence(self) -> str | None:
        """What the event says to a person, in a log or a terminal; None if it says nothing."""
        return None


@dataclass(frozen=True)
class RunStarted(Event):
    config_hash: str
    version: str
    devices: tuple[str, ...]
    model: str
    parameters: Int

    def sentence(self) -> str:
        return f"{self.model} on {', '.join(self.devices)}, rptrain {self.version}"


@dataclass(frozen=True)
class ProcessStarted(Event):
    """Who trains the run from now on, and what it was given; `rptrain.runs.process` says what `birth` is."""

    pid: Int
    host: str
    birth: str
    total_steps: Int
    staleness: Int  # steps by which updates are late
    memory: tuple[Mapping[str, Any], ...]  # planned: name, kind, parts ([name, bytes] each) and limit in bytes


@dataclass(frozen=True)
class Plan(Event):
    lines: tuple[str, ...]

    def sentence(self) -> str:
        return f"plan: {''.join(self.lines[:1])}"


@dataclass(frozen=True)
class Estimated(Event):
    """A step of the newest plan, in seconds: as planned, with its idle share; and what its arithmetic alone takes where
    everything is recomputed.
    """

    step_seconds: Float
    bubble: Float
    floor_seconds: Float


@dataclass(frozen=True)
class Step(Event):
    """A step that is done; `step` counts from 1. A skipped one left the weights as they were."""

    step: Int
    loss: Float | None
    learning_rate: Float
    grad_norm: Float | None  # before clipping
    tokens: Int  # padding included
    supervised: Int
    tokens_per_second: Float
    skipped: Bool = False

    severity: ClassVar[Severity] = "warning"  # of its sentence

    def sentence(self) -> str | None:
        return f"step {self.step}: skipped, the gradients were not finite" if self.skipped else None


@dataclass(frozen=True)
class LossScale(Event):
    """From this step on the loss is multiplied by `scale`: of float16 runs, ahead of the step's record."""

    step: Int
    scale: Float

    def sentence(self) -> str:
        return f"step {self.step}: the loss scale is {self.scale:g}"


@dataclass(frozen=True)
class StepSkipped(Event):
    """The gradients of a step were not finite, and it left the weights as they were."""

    step: Int
    in_a_row: Int
    micro_batches: tuple[Int, ...]  # whose loss was not finite; none where only gradients were
    rows: tuple[Int, ...]  # of the packed data, in these micro-batches
    texts: tuple[str, ...]  # how those rows begin

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str | None:
        if not self.rows:
            return None
        rows = ", ".join(map(str, self.rows[:SHOWN_ROWS])) + (" …" if len(self.rows) > SHOWN_ROWS else "")
        return f"step {self.step}: skipped, the loss is NaN in rows {rows} of the data"


class SlotTime(NamedTuple):
    """When a device ran a slot of a round: seconds of a monotonic clock."""

    device: Int
    slot: Int
    kind: str
    first_layer: Int
    last_layer: Int
    round: Int
    start: Float
    end: Float


@dataclass(frozen=True)
class Slots(Event):
    """With `engine.trace`: every slot of a step."""

    step: Int
    slots: tuple[SlotTime, ...]


@dataclass(frozen=True)
class Evaluation(Event):
    step: Int
    name: str
    score: Float
    tasks: Mapping[str, Float] = field(default_factory=dict)  # the score of each

    def sentence(self) -> str:
        return f"step {self.step}: {self.name} {self.score:.4g}"


@dataclass(frozen=True)
class Sample(Event):
    """What the model says to a prompt."""

    step: Int
    prompt: str
    text: str


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """Training went on while it was written, for all of `seconds` but `paused`."""

    step: Int
    path: str
    seconds: Float | None = None  # from the step's end until it was whole
    paused: Float | None = None  # of these, what training waited
    save_pause_s: Float | None = None  # that, and until the pipeline was empty: what the save cost, at the most

    def sentence(self) -> str:
        return f"step {self.step}: saved {self.path}"


@dataclass(frozen=True)
class SaveFailed(Event):
    """The state after `step` could not be saved: training goes on, and what was saved before is whole."""

    step: Int
    message: str

    severity: ClassVar[Severity] = "error"

    def sentence(self) -> str:
        return f"step {self.step}: cannot be saved: {self.message}"


@dataclass(frozen=True)
class RecordsLost(Event):
    """So many records that belong ahead of this one could not be written, as the disk was full, say."""

    count: Int
    message: str

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"{self.count} records could not be written: {self.message}"


@dataclass(frozen=True)
class TrackerFailed(Event):
    """A tracker of log.report_to raised, and gets no more numbers."""

    name: str
    message: str

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"{self.name} failed and is disabled: {self.message}"


@dataclass(frozen=True)
class Paused(Event):
    """Training waits after `step`, as it was told to."""

    step: Int

    def sentence(self) -> str:
        return f"paused after step {self.step}"


@dataclass(frozen=True)
class Continued(Event):
    step: Int

    def sentence(self) -> str:
        return "resumed"


@dataclass(frozen=True)
class Stopped(Event):
    """The run ended after `step`, which is saved, as it was told to: `by` "STOP" or a "signal"."""

    step: Int
    by: str

    def sentence(self) -> str:
        return f"stopped after step {self.step}"


@dataclass(frozen=True)
class Stalled(Event):
    """No step ended for so many seconds; `waiting`, and more in the file, says what threads and streams wait for."""

    step: Int  # the last that was done
    seconds: Float
    path: str
    waiting: Mapping[str, str]

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"no step ended for {self.seconds:g} s: {self.path} says what everything waits for"


@dataclass(frozen=True)
class MemoryLow(Event):
    """Of the host memory that the trainer takes or may still take, in bytes, little is left. Once a process."""

    taken: Int
    free: Int

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"only {format_bytes(self.free)} of host memory are left: the system may end the run"


@dataclass(frozen=True)
class Resumed(Event):
    """Training goes on after `step`; records of later steps that stand before this one are void."""

    step: Int
    path: str

    def sentence(self) -> str:
        return f"resumed from {self.path}, step {self.step}"


@dataclass(frozen=True)
class CheckpointDamaged(Event):
    """A checkpoint that was to be loaded is not as it was written; another one is taken."""

    path: str
    message: str

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"{self.message}: using another checkpoint"


@dataclass(frozen=True)
class BestLoaded(Event):
    """The model is that of the checkpoint after `step`, whose loss of held-out rows is the lowest."""

    step: Int
    path: str
    loss: Float

    def sentence(self) -> str:
        return f"the model is that of step {self.step}, with the lowest validation loss, {self.loss:.4f}"


@dataclass(frozen=True)
class Finished(Event):
    step: Int

    def sentence(self) -> str:
        return f"finished after {self.step} steps"


@dataclass(frozen=True)
class Failed(Event):
    message: str

    severity: ClassVar[Severity] = "error"

    def sentence(self) -> str:
        return self.message


EVENTS: dict[str, type[Event]] = {
    "run_started": RunStarted,
    "process_started": ProcessStarted,
    "plan": Plan,
    "estimated": Estimated,
    "step": Step,
    "loss_scale": LossScale,
    "step_skipped": StepSkipped,
    "slots": Slots,
    "evaluation": Evaluation,
    "sample": Sample,
    "checkpoint_saved": CheckpointSaved,
    "save_failed": SaveFailed,
    "records_lost": RecordsLost,
    "tracker_failed": TrackerFailed,
    "paused": Paused,
    "continued": Continued,
    "stopped": Stopped,
    "stalled": Stalled,
    "checkpoint_damaged": CheckpointDamaged,
    "memory_low": MemoryLow,
    "resumed": Resumed,
    "best_loaded": BestLoaded,
    "finished": Finished,
    "failed": Failed,
}
_NAMES = {kind: name for name, kind in EVENTS.items()}


def to_line(event: Event) -> str:
    """The record as JSON, without a line break."""
    record = {"schema": SCHEMA, "event": _NAMES[type(event)]} | asdict(event)
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":"))


def from_line(line: str | bytes) -> Event:
    """The record of a line. Raises UserError for what is no record, or one of a newer schema."""
    try:
        record = json.loads(line)
        schema, kind = record.pop("schema"), EVENTS[record.pop("event")]
        if schema > SCHEMA:
            raise UserError(f"the event has schema {schema} of a newer rptrain; this version reads up to {SCHEMA}")
        event = kind(**_values(record))
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, RecursionError):
        raise UserError("not an event record") from None
    if isinstance(event, Slots):
        return Slots(event.step, tuple(SlotTime(*slot) for slot in event.slots), time=event.time)
    return event


def from_fields(kind: type[Event], known: Mapping[str, Any]) -> Event:
    """An event from the fields that its record has, which another version may have written.

    Required fields that are missing are None.
    """
    required = (one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING)
    return kind(**{**dict.fromkeys(required), **known})


def read(path: Path | str) -> Iterator[Event]:
    """The records of a finished or living run; a last line that is not written to its end is left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield from_line(line)
            except UserError as error:
                raise UserError(f"{path}:{number}: {error}") from None


def is_finished(path: Path | str) -> bool:
    """Whether the run came to its end: its last record, looked at alone, is `finished`."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, SEEK_END) - _TAIL))
        *lines, _ = file.read().split(b"\n")
    try:
        return bool(lines) and isinstance(from_line(lines[-1]), Finished)
    except UserError:
        return False


class EventLog:
    """Appends records to a file, each there before `write` returns; threads may share it. Context manager.

    Records that the disk does not take are counted, which a `RecordsLost` says once it takes one: they do not end a
    run. If the file was deleted, `write` raises RunDeleted, in whichever thread. What a killed process left of a last
    line is cut off on opening. Raises UserError where another process holds the file: a run is trained by one at a
    time.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        try:
            self._file = LineFile(path, lock=True)
        except BlockingIOError:
            raise UserError(f"{path}: another process is training this run") from None
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror}; make it writable, or start a new run"
            ) from error
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Event], None]] = []
        self._lost, self._reason = 0, ""

    def write(self, event: Event) -> None:
        with self._lock:
            try:
                if self._lost:
                    self._file.append(to_line(RecordsLost(self._lost, self._reason)).encode())
                    self._lost = 0
                self._file.append(to_line(event).encode())
            except OSError as error:
                self._lose(error)
        for listener in self._listeners:
            listener(event)

    def check(self) -> None:
        """RunDeleted if the run's folder was deleted or moved: nothing may be written into one that took its place."""
        self._file.check()

    def listen(self, listener: Callable[[Event], None]) -> None:
        """It is called with every record from now on, once that is written."""
        self._listeners.append(listener)

    def close(self) -> None:
        if self._lost:
            _log.warning("%s lacks the last %d records", self._path, self._lost)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _lose(self, error: OSError) -> None:
        if not self._lost:
            _log.warning("%s cannot be written: %s. The run continues without records", self._path, error.strerror)
        self._lost, self._reason = self._lost + 1, str(error.strerror)


class Progress:
    """Shows steps on a terminal as a bar that moves, elsewhere as lines, and not at all when `quiet`."""

    def __init__(self, total_steps: int, *, quiet: bool = False, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._total = total_steps
        self._first: Step | None = None  # the pace is counted from here
        self._quiet = quiet
        self._console = console or Console()
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self._bar = Bar(*columns, console=self._console) if self._console.is_terminal and not quiet else None
        self._task = self._bar.add_task("", total=total_steps) if self._bar else None

    def update(self, step: Step) -> None:
        self._first = self._first or step
        text = describe(step, self._total, self._first)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step.step, description=text)
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """A line that stays, above the bar where there is one. Training goes on where it cannot be shown."""
        if not self._quiet:
            try:
                self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
            except OSError:  # a full disk takes the next line, perhaps
                return
            except SystemExit:  # rich ends the program where nobody reads on
                self._quiet = True

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def emit(log: EventLog, progress: Progress, event: Event) -> None:
    """Write a record, and say its sentence if it is a warning, an error or a choice that was made."""
    log.write(event)
    if (sentence := event.sentence()) and (event.severity != "info" or isinstance(event, BestLoaded)):
        progress.note(sentence)


def describe(step: Step, total_steps: int, first: Step) -> str:
    """A step in a line, with the time that the rest takes at the pace since `first`."""
    parts = [f"step {step.step}/{total_steps}"]
    if step.skipped:
        parts.append("skipped: the gradients were not finite")
    elif step.loss is not None:
        parts.append(f"loss {step.loss:.4f}")
    parts.append(f"{step.tokens_per_second:,.0f} tokens/s")
    if step.step > first.step:
        rest = (step.time - first.time) / (step.step - first.step) * (total_steps - step.step)
        if rest < timedelta.max.total_seconds():
            parts.append(f"ETA {timedelta(seconds=round(rest))}")
    return "  ".join(parts)


def _values(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
    return value
