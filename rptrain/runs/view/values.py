"""Values that a view of a run has for display."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rptrain.runs.records.events import VALIDATION_LOSS
from rptrain.runs.records.fields import Int
from rptrain.runs.records.lanes import LaneRecord, Snapshot
from rptrain.runs.records.process import ProcessId
from rptrain.utils.units import format_moment


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


def lowest(scores: Iterable[Score]) -> Score | None:
    """The first of the scores with the lowest validation loss; None if none of them is finite. That of step 0, before
    training, does not count: there is no checkpoint of it.
    """
    losses = [score for score in scores if score.name == VALIDATION_LOSS and score.score is not None and score.step]
    return min(losses, key=lambda score: score.score or 0.0, default=None)


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
    """The newest record of a device, and its averages over the last seconds."""

    now: LaneRecord
    busy: Mapping[str, float]  # share of the time spent computing, by kind of stage (F, FB, B)
    up: float  # bytes per second to the device
    down: float  # bytes per second from the device
    limit: int | None  # bytes of its memory that the run may use; None for CPU workers

    @property
    def busy_share(self) -> float:
        return min(1.0, sum(self.busy.values()))


def lane_views(window: Sequence[Snapshot], places: Sequence[MemoryUse]) -> tuple[LaneView, ...]:
    """A view of each device of the last of these snapshots, all of which have the same devices."""
    seconds = max(sum(shot.seconds for shot in window), 1e-3)
    limits = {place.name: place.limit for place in places}
    found = []
    for index, lane in enumerate(window[-1].lanes):
        part = [shot.lanes[index] for shot in window]
        kinds = [kind for kind in ("F", "FB", "B") if any(kind in one.busy for one in part)]
        busy = {kind: sum(one.busy.get(kind, 0.0) for one in part) / seconds for kind in kinds}
        up, down = (sum(getattr(one, way) for one in part) / seconds for way in ("up", "down"))
        found.append(LaneView(lane, busy, up, down, limits.get(lane.device)))
    return tuple(found)


@dataclass(frozen=True)
class Death:
    """A process that ended without a last record: the last step that it completed, and the time of its last record."""

    process: ProcessId | None
    step: int
    seen: float | None

    def before(self, later: ProcessId) -> str:
        """What is known of it once a later process trains the run."""
        when = "" if self.seen is None else f", last seen {format_moment(self.seen)}"
        after = f"after step {self.step}" if self.step else "before its first step was recorded"
        if self.process is not None and self.process.rebooted_before(later):
            cause = "the machine was restarted"
        else:
            cause = "perhaps killed (SIGKILL), also by the system if memory ran out"
        return f"the process before ended {after} without a last record{when}: {cause}"
