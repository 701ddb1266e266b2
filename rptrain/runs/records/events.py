"""Event records of a run (`events.jsonl`), each with its sentence."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from rptrain.runs.records.event import Event, Severity
from rptrain.runs.records.fields import Bool, Float, Int, known_fields
from rptrain.runs.records.loss_change import finished_sentence
from rptrain.runs.records.resume_events import CheckpointDamaged, LossDiffers, LossesRepeated, Resumed
from rptrain.runs.records.timeline import Schedule
from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular
from rptrain.utils.native_watchdog import LastRecord
from rptrain.utils.page_locks import locked_sentence
from rptrain.utils.units import format_bytes, format_loss, format_score

SHOWN_ROWS = 8  # rows of the data that a sentence lists
SCHEMA = 1  # of every record; within a schema, changes only add records, or fields at the end of a record
VALIDATION_LOSS = "loss"  # the name of an evaluation


@dataclass(frozen=True)
class RunStarted(Event):
    """A process begins or resumes the run. `trained`: seconds that earlier processes took; None in older versions."""

    config_hash: str
    version: str
    devices: tuple[str, ...]
    model: str
    parameters: Int
    trained: Float | None = None

    def sentence(self) -> str:
        return f"{self.model} on {', '.join(self.devices)}, rptrain {self.version}"


@dataclass(frozen=True)
class ProcessStarted(Event):
    """The process that trains the run from now on, and its settings. `birth` is that of `runs.records.process`."""

    pid: Int
    host: str
    birth: str
    total_steps: Int
    staleness: Int  # steps by which updates are late
    memory: tuple[Mapping[str, Any], ...]  # as planned: name, kind, parts ([name, bytes] pairs), limit in bytes
    processes: Int = 1  # that train the run together


@dataclass(frozen=True)
class Plan(Event):
    lines: tuple[str, ...]

    def sentence(self) -> str:
        return f"plan: {''.join(self.lines[:1])}"


@dataclass(frozen=True)
class Estimated(Event):
    """The estimated time of a step of the newest plan, and the share of it in which devices are idle (`bubble`).
    `floor_seconds` is the time of its arithmetic alone, with everything recomputed. `schedule`: its simulated step.
    """

    step_seconds: Float
    bubble: Float
    floor_seconds: Float
    schedule: Schedule | None = None


@dataclass(frozen=True)
class Step(Event):
    """A completed step. `step` counts from 1. A skipped step did not change the weights."""

    step: Int
    loss: Float | None
    learning_rate: Float
    grad_norm: Float | None  # before clipping
    tokens: Int  # padding included
    supervised: Int
    tokens_per_second: Float  # average since the last record, or of the last steps if they took longer
    skipped: Bool = False
    warm_up: Bool = False  # tokens_per_second is that of all steps so far, with the slow first ones: too few others
    compiled: Int = 0  # kernels that were compiled since the last record
    epoch: Float | None = None  # epochs after this step; None in older versions
    skips: Int = 0  # steps since the last record whose gradients were not finite

    severity: ClassVar[Severity] = "warning"  # of the sentence for a skipped step

    def sentence(self) -> str | None:
        return f"step {self.step}: skipped, the gradients were not finite" if self.skipped else None


@dataclass(frozen=True)
class Progress(Event):
    """What a process did in the last minute, so that curves cover days. Devices are in the order of `RunStarted`."""

    step: Int  # the last completed step
    phase: str
    seconds: Float  # that the record covers
    tokens_per_second: Float | None  # average of the steps; None if no step was completed
    process: Int  # bytes of host memory in use by the trainer
    free: Int  # bytes of host memory still available to it
    busy: tuple[Float, ...]  # share of the time in which each device computed; empty while no engine is open
    memory: tuple[Int, ...]  # most bytes in use on each GPU; empty if they are unknown
    power: tuple[Float, ...]  # average watts of each GPU; empty if they are unknown


@dataclass(frozen=True)
class LossScale(Event):
    """In a float16 run, the loss is multiplied by `scale` from this step on. Written before the step's record."""

    step: Int
    scale: Float

    def sentence(self) -> str:
        return f"step {self.step}: the loss scale is {self.scale:g}"


@dataclass(frozen=True)
class StepSkipped(Event):
    """The gradients of a step were not finite, and the weights were not changed."""

    step: Int
    in_a_row: Int
    micro_batches: tuple[Int, ...]  # those with a loss that was not finite; empty if only gradients were not
    rows: tuple[Int, ...]  # indices of the packed sequences in these micro-batches
    texts: tuple[str, ...]  # the beginnings of these sequences

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str | None:
        if not self.rows:
            return None
        rows = ", ".join(map(str, self.rows[:SHOWN_ROWS])) + (" …" if len(self.rows) > SHOWN_ROWS else "")
        return f"step {self.step}: skipped, the loss is NaN in packed sequences {rows}"


class SlotTime(NamedTuple):
    """When a device ran a slot of a round, in seconds of a monotonic clock."""

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
    """Every slot of a step. Written only with `engine.trace`."""

    step: Int
    slots: tuple[SlotTime, ...]


@dataclass(frozen=True)
class Evaluation(Event):
    step: Int
    name: str  # VALIDATION_LOSS, or that of a metric between 0 and 1
    score: Float | None  # None: not finite
    tasks: Mapping[str, Float] = field(default_factory=dict)  # the score of each task

    def sentence(self) -> str:
        return f"step {self.step}: {' '.join(describe_score(self.name, self.score))}"


@dataclass(frozen=True)
class Sample(Event):
    """Text that the model generated from a prompt."""

    step: Int
    prompt: str
    text: str


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is complete. Training continued while it was written, except during `paused`."""

    step: Int
    path: str
    seconds: Float | None = None  # from the end of the step until the checkpoint was complete
    paused: Float | None = None  # the part of `seconds` in which training waited
    save_pause_s: Float | None = None  # `paused` and the time to drain the pipeline: an upper bound of the save's cost

    def sentence(self) -> str:
        return f"step {self.step}: saved {self.path}"


@dataclass(frozen=True)
class SaveFailed(Event):
    """The state after `step` could not be saved. Training continues, and earlier checkpoints are intact."""

    step: Int
    message: str

    severity: ClassVar[Severity] = "error"

    def sentence(self) -> str:
        return f"step {self.step}: cannot be saved: {self.message}"


@dataclass(frozen=True)
class RowsLeftOut(Event):
    """Rows of the training sets were left out. `first`: the places of some, and why. `problem`: of which rows."""

    bad: Int
    total: Int
    first: tuple[str, ...]
    problem: str = "rows are bad"

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        more = f" and {self.bad - len(self.first)} more" if self.bad > len(self.first) else ""
        return f"{self.bad} of {self.total} {self.problem} and are left out: {'; '.join(self.first)}{more}"


@dataclass(frozen=True)
class MemoryNotLocked(Event):
    """Only `locked` of the `copied` bytes of host memory that GPUs copy are page-locked. `advice`: for this machine."""

    locked: Int
    copied: Int
    advice: str

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return locked_sentence(self.locked, self.copied, self.advice)


@dataclass(frozen=True)
class RecordsLost(Event):
    """`count` records before this one could not be written, for example because the disk was full."""

    count: Int
    message: str

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"{self.count} records could not be written: {self.message}"


@dataclass(frozen=True)
class TelemetryFailed(Event):
    """`lanes.jsonl` has no more records of this process; training continues."""

    message: str

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"telemetry failed and is disabled: {self.message}"


@dataclass(frozen=True)
class TrackerFailed(Event):
    """A tracker of log.report_to raised an exception or hung, and logging to it is disabled."""

    name: str
    message: str

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"{self.name} failed and is disabled: {self.message}"


@dataclass(frozen=True)
class Paused(Event):
    """Training was paused by a command and waits after `step`."""

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
    """A command (`by` is "STOP") or a signal ("signal") ended the run. `step` is that of the last checkpoint, or 0."""

    step: Int
    by: str

    def sentence(self) -> str:
        saved = f"stopped; the last checkpoint is of step {self.step}"
        return saved if self.step else "stopped before the first checkpoint"


@dataclass(frozen=True)
class Stalled(Event):
    """No progress for `seconds`. `waiting` says what threads and streams wait for; the file at `path` says more."""

    step: Int  # the last completed step
    seconds: Float
    path: str
    waiting: Mapping[str, str]
    phase: str = "training"

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"no progress for {self.seconds:g} s while {self.phase}: {self.path} says what everything waits for"


@dataclass(frozen=True)
class MemoryLow(Event):
    """Little host memory is left: bytes used by the trainer, and still available to it. At most once per process."""

    taken: Int
    free: Int

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"only {format_bytes(self.free)} of host memory are left: the system may end the run"


@dataclass(frozen=True)
class ProcessSlow(Event):
    """One of several processes computes its share of a step more slowly than the others: the medians of recent steps,
    its own and that of all, in seconds.
    """

    step: Int
    process: str
    seconds: Float
    median: Annotated[Float, Field(gt=0)]

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        ratio = self.seconds / self.median
        return f"step {self.step}: {self.process} takes {ratio:.1f} times as long for its share as the others"


@dataclass(frozen=True)
class BestLoaded(Event):
    """The model is that of the checkpoint after `step`, which has the lowest validation loss."""

    step: Int
    path: str
    loss: Float

    def sentence(self) -> str:
        return f"the model is that of step {self.step}, with the lowest validation loss, {self.loss:.4f}"


@dataclass(frozen=True)
class Finished(Event):
    step: Int

    def sentence(self) -> str:
        return finished_sentence(self.step)


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
    "progress": Progress,
    "loss_scale": LossScale,
    "step_skipped": StepSkipped,
    "slots": Slots,
    "evaluation": Evaluation,
    "sample": Sample,
    "checkpoint_saved": CheckpointSaved,
    "save_failed": SaveFailed,
    "rows_left_out": RowsLeftOut,
    "memory_not_locked": MemoryNotLocked,
    "records_lost": RecordsLost,
    "tracker_failed": TrackerFailed,
    "telemetry_failed": TelemetryFailed,
    "paused": Paused,
    "continued": Continued,
    "stopped": Stopped,
    "stalled": Stalled,
    "checkpoint_damaged": CheckpointDamaged,
    "memory_low": MemoryLow,
    "process_slow": ProcessSlow,
    "resumed": Resumed,
    "losses_repeated": LossesRepeated,
    "loss_differs": LossDiffers,
    "best_loaded": BestLoaded,
    "finished": Finished,
    "failed": Failed,
}
NAMES = {kind: name for name, kind in EVENTS.items()}


def to_line(event: Event) -> str:
    """The record as JSON on one line."""
    record = {"schema": SCHEMA, "event": NAMES[type(event)]} | asdict(event)
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":"))


def last_record(path: Path, event: Event) -> LastRecord:
    """The record as the native watchdog writes it, with the time at which it does."""
    before, after = to_line(replace(event, time=0.5)).split("0.5", 1)
    return LastRecord(path, before, after)


def from_line(line: str | bytes) -> Event:
    """The record of a line. Raises UserError if the line is not a record, or has a newer schema."""
    try:
        record = json.loads(line)
        schema, kind = record.pop("schema"), EVENTS[record.pop("event")]
        if schema <= SCHEMA:
            return kind(**known_fields(record, kind))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise UserError("not an event record") from None
    raise UserError(f"the event has schema {schema} of a newer rptrain; this version reads up to {SCHEMA}")


def from_fields(kind: type[Event], known: Mapping[str, Any]) -> Event:
    """An event from the fields of its record. Another version may have written it: missing required fields are None."""
    required = (one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING)
    return kind(**{**dict.fromkeys(required), **known})


def read(path: Path | str) -> Iterator[Event]:
    """The records of a finished or active run, without an incomplete last line.

    Raises UserError as `from_line`, and if the file is not a regular file.
    """
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield from_line(line)
            except UserError as error:
                raise UserError(f"{path}:{number}: {error}") from None


def describe_score(name: str, score: float | None) -> tuple[str, str]:
    """The name and the value of an evaluation as text, such as "exact match" and "97.4%"."""
    if name == VALIDATION_LOSS:
        return "validation loss", "not finite" if score is None else format_loss(score)
    return name.replace("_", " "), format_score(score)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
    return value
