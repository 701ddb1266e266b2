"""A measurement of one kernel at one shape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """`ours` and `others` do the same work; `nbytes` and `flops` are the least that it takes."""

    name: str
    ours: Callable[[], object]
    others: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    nbytes: int = 0
    flops: float = 0.0
