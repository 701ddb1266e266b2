"""The runs of a folder as they go on: what was read once of a run is not read again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rptrain.runs.listing import Summary, summarise
from rptrain.runs.view import RunView

LARGE = 1 << 20  # bytes of events that are read of a run as they are; of more, a part


@dataclass(frozen=True)
class Losses:
    """A run's curve, for a plot."""

    name: str
    steps: Sequence[float]
    losses: Sequence[float]


class RunFolder:
    """For one thread at a time; `look` may take a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._views: dict[Path, RunView] = {}

    def look(self) -> list[Summary]:
        """What there is now, the newest first. A folder that is not there has none."""
        views: dict[Path, RunView] = {}
        for file in self._folder.glob("*/config.toml"):
            run = file.parent
            if run in self._views:
                views[run] = self._views[run]
                views[run].refresh()
            else:
                views[run] = RunView(run, large=LARGE)
        self._views = views
        return sorted(map(summarise, views.values()), key=lambda run: (-(run.began or 0.0), run.path))

    def losses(self, run: Path, count: int) -> Losses:
        """At most `count` points of a run that `look` has found."""
        steps, losses = self._views[run].steps.points("loss", count)
        return Losses(run.name, steps, losses)
