"""Records of `lanes.jsonl`: the activity of each device, the optimizer and the host, up to four times per second.

A line is a JSON object with `schema` and the fields of `Snapshot`. When the file is full it is renamed to
`lanes.old.jsonl` and a new one is started, so the two files cover the last hours.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal

from rptrain.runs.records.fields import Float, Int, UnixTime, validator
from rptrain.runs.records.timeline import StepTimeline

SCHEMA = 1
LOW_MEMORY = 0.05  # host memory is low when a smaller fraction of what the process could use is free
LEAST = 0.1  # a device that computes for a smaller fraction of a record's time counts as waiting
FILE, OLD_FILE = "lanes.jsonl", "lanes.old.jsonl"

Phase = Literal["loading", "training", "paused", "saving", "evaluating", "exporting"]
Doing = Literal["computing", "waiting", "idle"]  # idle: it has no work


@dataclass(frozen=True)
class LaneRecord:
    """The state of a device, and its work since the previous snapshot."""

    device: str
    doing: Doing
    stage: str | None = None  # the current or next stage, such as "F0-3"
    kind: str | None = None  # of the stage: F, FB or B
    slot: Int | None = None  # its number within the step
    micro_batch: Int | None = None
    step: Int | None = None  # counts from 1
    waiting: str | None = None  # what the device waits for, as text; None while it computes
    busy: Mapping[str, Float] = field(default_factory=dict)  # seconds of computation, by kind of stage
    up: Int = 0  # bytes copied to the device
    down: Int = 0  # bytes copied from the device
    memory: Int | None = None  # bytes in use on the GPU, as the driver reports; None for CPU workers
    utilisation: Int | None = None  # percent, as the driver reports
    temperature: Int | None = None  # degrees Celsius
    power: Float | None = None  # watts, as the driver reports


@dataclass(frozen=True)
class OptimizerState:
    """The activity of the optimizer's thread. `queue` counts the steps that were submitted and not yet applied."""

    doing: str
    queue: Int
    seconds: Float | None  # duration of the last update; None before the first


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a completed step; None: not finite, or not known."""

    step: Int  # counts from 1
    loss: Float | None
    learning_rate: Float
    grad_norm: Float | None
    tokens_per_second: Float | None  # average of the last steps; None while the run warms up
    seconds: Float | None = None  # duration of the step

    @classmethod
    def of(
        cls, step: int, loss: float, rate: float, norm: float | None, speed: float | None, seconds: float | None
    ) -> "StepNumbers":
        """The numbers of a step, where numbers that are not finite become None. `speed`: tokens per second."""
        duration = None if seconds is None else round(seconds, 6)
        speed = None if speed is None else round(speed, 3)
        return cls(step, _finite(loss), rate, _finite(norm), speed, duration)


@dataclass(frozen=True)
class Work:
    """What the process does, for longer than a moment: see `rptrain.utils.phases`."""

    text: str  # such as "reading weights: 3.20 GiB of 15.0 GiB, 21%, 14 s left"
    share: Float | None  # that is done; None if it is unknown
    beside: bool = False  # the run's numbers, not in their place


@dataclass(frozen=True)
class Snapshot:
    time: UnixTime
    seconds: Float  # since the previous snapshot
    phase: Phase
    process: Int  # bytes of host memory in use by the trainer
    free: Int  # bytes of host memory still available to it
    lanes: tuple[LaneRecord, ...]  # empty while no engine is open
    optimizer: OptimizerState | None
    last: StepNumbers | None = None  # the last step, in the first snapshot after its end
    timeline: StepTimeline | None = None  # of a recent step, every few seconds
    work: Work | None = None  # a phase that has lasted for some seconds

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """For each lane the kind of stage that took most of its time; empty if it hardly computed."""
        return tuple(_main_kind(lane.busy, LEAST * max(self.seconds, 1e-3)) for lane in self.lanes)

    @property
    def is_low(self) -> bool:
        """Whether little host memory is left."""
        return self.free < LOW_MEMORY * (self.process + self.free)

    def to_line(self) -> str:
        """The snapshot as JSON on one line, without `last`, `timeline`, `work` and fields of lanes that are None."""
        record = {"schema": SCHEMA, **asdict(self)}
        for name in ("last", "timeline", "work"):
            if record[name] is None:
                del record[name]
        record["lanes"] = [
            {name: value for name, value in lane.items() if value is not None} for lane in record["lanes"]
        ]
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: bytes | str) -> "Snapshot | None":
        """The snapshot of a line; None if the line is not a valid record of this schema."""
        try:
            record: dict[str, Any] = json.loads(line)
            return validator(cls)(record) if record.pop("schema") == SCHEMA else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def _main_kind(busy: Mapping[str, float], least: float) -> str:
    kind, most = max(busy.items(), key=itemgetter(1), default=("", 0.0))
    return kind if most > least else ""


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
