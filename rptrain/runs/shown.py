"""Values that a view of a run has for display."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rptrain.runs.lanes import LaneRecord
from rptrain.runs.records import Int


@dataclass(frozen=True)
class Checkpoint:
    time: float
    step: int
    path: str


@dataclass(frozen=True)
class Score:
    """The result of an evaluation. `tasks` has the score of each task."""

    time: float
    step: int
    name: str
    score: float | None  # None: not finite
    tasks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LogLine:
    time: float
    text: str
    kind: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True)
class MemoryUse:
    """The planned use of a memory (the host, a GPU, the disk), in bytes. `limit` is None if it is unknown."""

    name: str
    kind: str
    parts: tuple[tuple[str, Int], ...]  # bytes by use
    limit: Int | None

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class LaneView:
    """The newest record of a device, and its averages over the last WINDOW seconds."""

    now: LaneRecord
    busy: Mapping[str, float]  # share of the time spent computing, by kind of stage (F, FB, B)
    up: float  # bytes per second to the device
    down: float  # bytes per second from the device
    limit: int | None  # bytes of its memory that the run may use; None for CPU workers

    @property
    def busy_share(self) -> float:
        return min(1.0, sum(self.busy.values()))
