"""Summaries of a folder's runs, which are read incrementally."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rptrain.runs.listing import Summary, summarize
from rptrain.runs.view import RunView

LARGE = 1 << 20  # bytes of a run's events that are read completely; of larger files, a part


@dataclass(frozen=True)
class Losses:
    """The loss curve of a run."""

    name: str
    steps: Sequence[float]
    losses: Sequence[float]


class RunFolder:
    """The runs of a folder. A thread reads them and owns their data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._views: dict[Path, RunView] = {}
        self._thread = ThreadPoolExecutor(1, "runs")

    async def look(self) -> list[Summary]:
        """The current runs, the newest first; none if the folder does not exist."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._look)

    async def losses(self, runs: Sequence[Path], count: int) -> list[Losses]:
        """At most `count` points of each run; none for a run that `look` has not found."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._losses, tuple(runs), count)

    def _look(self) -> list[Summary]:
        views: dict[Path, RunView] = {}
        for file in self._folder.glob("*/config.toml"):
            run = file.parent
            if run in self._views:
                views[run] = self._views[run]
                views[run].refresh()
            else:
                views[run] = RunView(run, large=LARGE)
        self._views = views
        return sorted(map(summarize, views.values()), key=lambda run: (-(run.began or 0.0), run.path))

    def _losses(self, runs: Sequence[Path], count: int) -> list[Losses]:
        points = [self._views[run].steps.points("loss", count) if run in self._views else ([], []) for run in runs]
        return [Losses(run.name, *found) for run, found in zip(runs, points, strict=True)]
