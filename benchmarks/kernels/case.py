"""A measurement of one kernel at one shape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """`ours` and `others` do the same work, `floor` a part of it that all share; `nbytes` and `flops` are the least."""

    name: str
    ours: Callable[[], object]
    others: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    nbytes: int = 0
    flops: float = 0.0
    floor: Callable[[], object] | None = None
