"""Summaries of a folder's runs, which are read incrementally."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rptrain.runs.folder.comparison import Axis, Row, curve, differences, results
from rptrain.runs.folder.listing import Listing, Summary, Tell
from rptrain.runs.view.run_view import RunView
from rptrain.tui.services.launch import Launched

LARGE = 1 << 20  # bytes of a run's events that are read completely; of larger files, a part


@dataclass(frozen=True)
class Compared:
    """Runs with the curve of a metric, their results and the settings that differ."""

    runs: Sequence[Path]
    curves: Sequence[tuple[Sequence[float], Sequence[float]]]  # x and y
    results: Sequence[Row]
    differences: Sequence[Row]


def with_starting(found: Sequence[Summary], folder: Path, launched: Iterable[Launched]) -> list[Summary]:
    """The runs of a folder, with those that were started here and whose trainer has not created their folder yet."""
    folder, known = folder.absolute(), {run.path.absolute() for run in found}
    starting = [
        _starting(one)
        for one in launched
        if one.fresh and one.running and one.path.absolute().parent == folder and one.path.absolute() not in known
    ]
    return [*starting, *found]


def _starting(launched: Launched) -> Summary:
    return Summary(
        path=launched.path,
        state="starting",
        step=0,
        total_steps=None,
        loss=None,
        validation_loss=None,
        best_loss=None,
        best_step=None,
        tokens_per_second=None,
        began=launched.began,
        seconds=time.time() - launched.began,
        nbytes=0,
        model="",
    )


class RunFolder:
    """The runs of a folder. A thread reads them and owns their data."""

    def __init__(self, folder: Path) -> None:
        self._listing = Listing(folder)
        self._views: dict[Path, RunView] = {}  # of the compared runs
        self._thread = ThreadPoolExecutor(1, "runs")

    async def read(self, tell: Tell | None = None) -> list[Summary]:
        """The current runs, the newest first; none if the folder does not exist. `tell`: that of `Listing.read`, called
        in this thread.
        """
        loop, report = asyncio.get_running_loop(), None
        if tell is not None:
            report = partial(loop.call_soon_threadsafe, tell)  # an error ends the reading once the loop is closed
        return await loop.run_in_executor(self._thread, self._listing.read, report)

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
