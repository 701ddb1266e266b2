"""What a view of a run consists of, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Checkpoint:
    time: float
    step: int
    path: str


@dataclass(frozen=True)
class Score:
    """An evaluation; `tasks` has the score of each."""

    time: float
    step: int
    name: str
    score: float
    tasks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LogLine:
    time: float
    text: str
    kind: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True)
class MemoryUse:
    """A memory that the run was planned for, in bytes: the host, a GPU, the disk. `limit` is None where not known."""

    name: str
    kind: str
    parts: tuple[tuple[str, int], ...]  # by what takes it
    limit: int | None

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)
