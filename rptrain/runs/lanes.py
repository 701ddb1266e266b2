"""Records of `lanes.jsonl`: what each device of a run, the optimizer and the host do, up to four times a second.

A line is a JSON object with `schema` and the fields of `Snapshot`. The file is kept small: when it is full it becomes
`lanes.old.jsonl` and a new one begins, so the two hold the last hours.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rptrain.runs.records import Float, Int, UnixTime, validator

SCHEMA = 1
FILE, OLD_FILE = "lanes.jsonl", "lanes.old.jsonl"

Phase = Literal["loading", "training", "paused", "saving", "evaluating", "exporting"]
Doing = Literal["computing", "waiting", "idle"]  # idle: it was given nothing


@dataclass(frozen=True)
class LaneRecord:
    """A device at a moment, and what it did since the snapshot before."""

    device: str
    doing: Doing
    stage: str | None = None  # such as "F0-3", that it computes or computes next
    kind: str | None = None  # of the stage: F, FB or B
    slot: Int | None = None  # its number within the step
    micro_batch: Int | None = None
    step: Int | None = None  # counts from 1
    waiting: str | None = None  # for what, in words; None while it computes
    busy: Mapping[str, Float] = field(default_factory=dict)  # seconds of computation since, by kind of stage
    up: Int = 0  # bytes copied to the device since
    down: Int = 0  # and from it
    memory: Int | None = None  # bytes taken on the card, by the driver; None for workers on the CPU
    utilisation: Int | None = None  # percent, by the driver
    temperature: Int | None = None  # degrees Celsius


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer's thread does; `queue` counts steps that were submitted and not yet applied."""

    doing: str
    queue: Int
    seconds: Float | None  # of the last update, None before the first


@dataclass(frozen=True)
class Snapshot:
    time: UnixTime
    seconds: Float  # since the snapshot before
    phase: Phase
    process: Int  # bytes of host memory that the trainer takes
    free: Int  # bytes of host memory that it may still take
    lanes: tuple[LaneRecord, ...]  # empty where no engine is open
    optimizer: OptimizerState | None

    def to_line(self) -> str:
        """As JSON without a line break; what is None is left out of lanes."""
        record = {"schema": SCHEMA, **asdict(self)}
        record["lanes"] = [
            {name: value for name, value in lane.items() if value is not None} for lane in record["lanes"]
        ]
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: bytes | str) -> "Snapshot | None":
        """None for a line that is no record of this schema."""
        try:
            record: dict[str, Any] = json.loads(line)
            return validator(cls)(record) if record.pop("schema") == SCHEMA else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
