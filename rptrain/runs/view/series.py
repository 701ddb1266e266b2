"""The steps of a run as columns of numbers, and the thinning of a column to the points of a plot."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import nan
from operator import itemgetter
from typing import Any, TypeVar

SMOOTH = 0.05  # of the points of a curve
COLUMNS = ("step", "time", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second")
_row = itemgetter(*COLUMNS)
T = TypeVar("T")


class Steps:
    """One row per reported step, in increasing order. Adding an earlier step removes the rows from that step on."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in COLUMNS}
        self._appends = [column.append for column in self._columns.values()]  # a run may have 100,000 rows
        self._derived: dict[tuple[str, Callable[..., Any]], Any] = {}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a `step` record, with NaN for a value that is None. Raises KeyError if a value is missing."""
        values = _row(record)
        steps, number = self._columns["step"], values[0]
        if steps and number <= steps[-1]:
            self.keep(number - 1)
        if None in values:
            values = [nan if value is None else value for value in values]
        for append, value in zip(self._appends, values, strict=True):
            append(value)
        self._derived.clear()

    def keep(self, last: float) -> None:
        """Removes the steps after `last`."""
        count = bisect_right(self._columns["step"], last)
        for column in self._columns.values():
            del column[count:]
        self._derived.clear()

    def last(self, name: str) -> float | None:
        """The newest value of a column: None if there are no steps, NaN if the record had null."""
        column = self._columns[name]
        return column[-1] if column else None

    def column(self, name: str) -> Sequence[float]:
        """All values of a column, without a copy: do not change them."""
        return self._columns[name]

    def derived(self, name: str, compute: Callable[[Sequence[float]], T]) -> T:
        """What a function computes from a column. It is called again only after rows were added or removed."""
        key = name, compute
        if key not in self._derived:
            self._derived[key] = compute(self._columns[name])
        return self._derived[key]

    def since(self, step: float) -> int:
        """The index of the first row after a step."""
        return bisect_left(self._columns["step"], step + 1)

    def points(self, name: str, count: int) -> tuple[list[float], list[float]]:
        """Steps and values of a column for a plot, at most `count` of them; see `thinned`."""
        return thinned(self._columns["step"], self._columns[name], count)


def smoothed(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The averages of a curve over SMOOTH of its points, the middle one of which gives the step. Values that are not
    finite are left out.
    """
    import numpy as np

    xs, ys = np.array(steps), np.array(values)
    finite = np.isfinite(ys)
    xs, ys = xs[finite], ys[finite]
    count = len(ys)
    half = max(1, int(count * SMOOTH / 2))
    places = np.arange(count)
    counts = np.minimum(places + half + 1, count) - np.maximum(places - half, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        means = _window_sums(np.pad(ys, half), 2 * half + 1) / counts
    return xs.tolist(), means.tolist()


def _window_sums(values: Any, width: int) -> Any:
    """The sum of each `width` consecutive values of an array. A huge value costs only the windows with it digits, since
    sums of 1, 2, 4, … values are added, and nothing is subtracted.
    """
    import numpy as np

    sums, added, size = np.zeros(len(values) - width + 1), 0, 1
    while added < width:
        if width & size:
            sums += values[added : added + len(sums)]
            added += size
        values, size = values[:-size] + values[size:], 2 * size
    return sums


def thinned(steps: Sequence[float], values: Sequence[float], count: int) -> tuple[list[float], list[float]]:
    """At most `count` points of a curve, with its peaks and both ends. Values that are not finite are left out.

    The points are divided into count / 2 - 1 groups of equal size, and each group keeps its minimum and its maximum.
    """
    import numpy as np

    xs, ys = np.array(steps), np.array(values)
    finite = np.isfinite(ys)
    xs, ys = xs[finite], ys[finite]
    if len(ys) > max(count, 4):
        groups = max(count // 2 - 1, 1)
        starts = np.arange(groups) * len(ys) // groups
        ends = [*starts[1:], len(ys)]
        kept = [
            start + place(ys[start:end])
            for start, end in zip(starts, ends, strict=True)
            for place in (np.argmin, np.argmax)
        ]
        chosen = np.unique(np.array([0, *kept, len(ys) - 1]))  # sorted
        xs, ys = xs[chosen], ys[chosen]
    return xs.tolist(), ys.tolist()
