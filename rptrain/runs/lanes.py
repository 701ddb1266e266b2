"""Records of `lanes.jsonl`: what each device of a run, the optimizer and the host do, up to four times a second.

A line is a JSON object with `schema` and the fields of `Snapshot`. The file is kept small: when it is full it becomes
`lanes.old.jsonl` and a new one begins, so the two hold the last hours.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rptrain.runs.shape import fits, is_time

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
    slot: int | None = None  # its number within the step
    micro_batch: int | None = None
    step: int | None = None  # counts from 1
    waiting: str | None = None  # for what, in words; None while it computes
    busy: Mapping[str, float] = field(default_factory=dict)  # seconds of computation since, by kind of stage
    up: int = 0  # bytes copied to the device since
    down: int = 0  # and from it
    memory: int | None = None  # bytes taken on the card, by the driver; None for workers on the CPU
    utilisation: int | None = None  # percent, by the driver
    temperature: int | None = None  # degrees Celsius


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer's thread does; `queue` counts steps that were submitted and not yet applied."""

    doing: str
    queue: int
    seconds: float | None  # of the last update, None before the first


@dataclass(frozen=True)
class Snapshot:
    time: float  # Unix seconds
    seconds: float  # since the snapshot before
    phase: Phase
    process: int  # bytes of host memory that the trainer takes
    free: int  # bytes of host memory that it may still take
    lanes: tuple[LaneRecord, ...] = ()  # empty where no engine is open
    optimizer: OptimizerState | None = None

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
            if record.pop("schema") != SCHEMA or not is_time(record["time"]) or not fits(record, cls):
                return None
            optimizer = record.pop("optimizer")
            lanes = tuple(LaneRecord(**lane) for lane in record.pop("lanes"))
            return cls(**record, lanes=lanes, optimizer=None if optimizer is None else OptimizerState(**optimizer))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
