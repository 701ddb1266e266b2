"""Summaries of a folder's runs, which are read incrementally."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rptrain.runs.comparison import Axis, Row, curve, differences, results
from rptrain.runs.listing import Listing, Summary
from rptrain.runs.view import RunView

LARGE = 1 << 20  # bytes of a run's events that are read completely; of larger files, a part


@dataclass(frozen=True)
class Compared:
    """Runs with the curve of a metric, their results and the settings that differ."""

    runs: Sequence[Path]
    curves: Sequence[tuple[Sequence[float], Sequence[float]]]  # x and y
    results: Sequence[Row]
    differences: Sequence[Row]


class RunFolder:
    """The runs of a folder. A thread reads them and owns their data."""

    def __init__(self, folder: Path) -> None:
        self._listing = Listing(folder)
        self._views: dict[Path, RunView] = {}  # of the compared runs
        self._thread = ThreadPoolExecutor(1, "runs")

    async def look(self) -> list[Summary]:
        """The current runs, the newest first; none if the folder does not exist."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._listing.read)

    async def compare(self, runs: Sequence[Path], metric: str, axis: Axis, count: int) -> Compared:
        """The comparison of these runs, with at most `count` points of each curve."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._compare, tuple(runs), metric, axis, count
        )

    def _compare(self, runs: Sequence[Path], metric: str, axis: Axis, count: int) -> Compared:
        views = self._opened(runs)
        curves = [curve(view, metric, axis, count) for view in views]
        return Compared(runs, curves, results(views), differences(runs))

    def _opened(self, runs: Sequence[Path]) -> Sequence[RunView]:
        """The views of these runs with their newest records; those of other runs are closed."""
        self._views = {run: self._views.get(run) or RunView(run, large=LARGE, empty=True) for run in runs}
        for view in self._views.values():
            view.refresh()
        return tuple(self._views.values())
