"""Lists the runs of a folder, with a summary of each run."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len

from rptrain.checkpoint.metadata import CHECKPOINTS, EVENTS, RUN_CONFIG
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.records.fields import time_of
from rptrain.runs.records.lanes import FILE
from rptrain.runs.records.process import other_folders
from rptrain.runs.view.process_view import ENDED, State
from rptrain.runs.view.run_view import RunView
from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular
from rptrain.utils.paths import inside
from rptrain.utils.phases import phase
from rptrain.utils.text import printable
from rptrain.utils.units import format_bytes, format_duration, format_loss, format_speed

if TYPE_CHECKING:
    from rich.console import Console

DROPPED = ("size", "took", "began", "tokens/s", "processes", "best validation")  # columns, if there is too little space
GAP = 2  # characters between two columns
AT_ONCE = 50  # runs in the first report: more than a screen shows
PERIOD = 0.5  # seconds between two reports
HEAD = 1 << 12  # bytes at the beginning of the events, of which one of the first tells when the run began
GLANCE = 1 << 18  # limit of what is read for a summary: the start and the end of the events are enough


@dataclass(frozen=True)
class Summary:
    """A summary of a run. Fields that its records do not give are None."""

    path: Path
    state: State | Literal["starting"]  # "starting": the interface started it, and it has no folder yet
    step: int
    total_steps: int | None
    loss: float | None  # the latest
    validation_loss: float | None  # the latest
    best_loss: float | None  # the lowest validation loss
    best_step: int | None  # and its step
    tokens_per_second: float | None  # as that of a RunView
    began: float | None  # Unix seconds
    seconds: float | None  # in which processes trained it
    nbytes: int  # size of its folder
    model: str
    processes: int = 1  # that train the run together

    def to_dict(self) -> dict[str, Any]:
        """The summary as values for JSON."""
        return {**asdict(self), "path": str(self.path)}


Tell = Callable[[list[Summary], int], object]  # gets the runs that are read, and how many there are


def summaries(folder: Path) -> list[Summary]:
    """Summaries of the runs in a folder, the newest first. A missing folder has none."""
    return Listing(folder).read()


def newest(folder: Path) -> Path | None:
    """The run in a folder that began last, of which there may be thousands; None if there is none."""
    return min(_runs(folder), key=lambda run: (-_began(run), run), default=None)


def _began(run: Path) -> float:
    """When a run began, as its summary tells; 0 if it has no records."""
    try:
        with open_regular(inside(run, EVENTS)) as file:
            lines = file.read(HEAD).split(b"\n")[:-1]
    except (OSError, UserError):
        return 0.0
    for line in lines:
        with suppress(ValueError, AttributeError):
            if (record := json.loads(line)).get("event") == "run_started":
                return time_of(record, 0.0) or 0.0
    return RunView(run, large=GLANCE, brief=True).began or 0.0


def _runs(folder: Path) -> Iterator[Path]:
    return (file.parent for file in folder.glob("*/config.toml"))


def _newest_first(found: Iterable[Summary]) -> list[Summary]:
    return sorted(found, key=lambda run: (-(run.began or 0.0), run.path))


def training_beside(source: Path) -> str:
    """The name of a run that trains on this machine: the one that holds `source`, or one in the same folder.

    Empty if there is none.
    """
    source = source.absolute()
    own = next((place for place in (source, *source.parents) if (place / RUN_CONFIG).is_file()), source)
    for run in (own, *_runs(own.parent)):
        view = RunView(run, large=GLANCE)
        if view.process is not None and view.process.here and not view.ended:
            return run.name
    return ""


def delete(folder: Path) -> None:
    """Deletes a run's folder. UserError if a process is training the run, whatever its records say, or if its events
    are a link that leads out of the folder.
    """
    for process in (folder, *other_folders(folder).values()):
        if (events := inside(process, "events.jsonl")).is_file():
            EventLog(events).close()  # raises UserError if another process holds it
    shutil.rmtree(folder)


def summarize(view: RunView) -> Summary:
    return Summary(
        path=view.path,
        state=view.state,
        step=view.step,
        total_steps=view.total_steps,
        loss=view.loss,
        validation_loss=view.results.validation_loss,
        best_loss=None if view.results.best is None else view.results.best.score,
        best_step=None if view.results.best is None else view.results.best.step,
        tokens_per_second=view.tokens_per_second,
        began=view.began,
        seconds=view.seconds(time.time()),
        nbytes=folder_bytes(view.path),
        model=view.model,
        processes=view.process_count,
    )


class Listing:
    """The runs of a folder, read again and again. Runs that have ended are read only once, until their files change.

    It belongs to one thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, _Known] = {}

    def read(self, tell: Tell | None = None) -> list[Summary]:
        """As `summaries`. `tell` is called now and then with those that are read so far, which are about the newest
        ones, in any order, and with the number of all: after the first AT_ONCE, and about every PERIOD seconds.
        """
        before, self._known = self._known, {}
        runs, found, due = sorted(_runs(self._folder), key=_changed_last), list[Summary](), math.inf
        with phase("reading runs", len(runs), "run") as reading:
            for run in runs:
                self._known[run] = known = self._read(run, before.get(run))
                found.append(known.summary)
                reading.add()
                if tell is not None and (len(found) == AT_ONCE or time.monotonic() > due):
                    tell([*found], len(runs))
                    due = time.monotonic() + PERIOD
        return _newest_first(found)

    def _read(self, run: Path, known: "_Known | None") -> "_Known":
        stamp = _stamp(run)
        if known is not None and known.view is None and known.stamp == stamp:
            return known
        if known is None or known.view is None:
            view = RunView(run, large=GLANCE, brief=True)
        else:
            view = known.view
            view.refresh()
        summary = summarize(view)
        return _Known(stamp, summary, None if summary.state in ENDED else view)


_Stamp = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class _Known:
    """What is known about a run. `view`: None if it has ended."""

    stamp: _Stamp
    summary: Summary
    view: RunView | None


def _changed_last(run: Path) -> int:
    """A key that sorts the runs that were begun or resumed last first, without reading them."""
    changed = _changed(run / RUN_CONFIG)
    return 0 if changed is None else -changed[0]


def _stamp(run: Path) -> _Stamp:
    """What changes when a process writes to the run, or when a checkpoint or an export in it is added or removed."""
    return tuple(map(_changed, (run, run / CHECKPOINTS, run / EVENTS, run / FILE)))


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder. Files that disappear meanwhile or cannot be read are not counted."""
    total, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total


def show(runs: Iterable[Summary], console: "Console") -> None:
    """Prints the summaries as a table, with the columns that fit."""
    from rich.table import Table
    from rich.text import Text

    runs = list(runs)
    columns: dict[str, list[str]] = {
        "run": [printable(run.path.name) for run in runs],
        "state": [run.state for run in runs],
        "step": [f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step) for run in runs],
        "loss": ["" if run.loss is None else format_loss(run.loss) for run in runs],
    }
    if any(run.best_loss is not None for run in runs):
        columns["best validation"] = [
            "" if run.best_loss is None else f"{format_loss(run.best_loss)} at {run.best_step}" for run in runs
        ]
    columns |= {
        "tokens/s": ["" if (speed := run.tokens_per_second) is None else format_speed(speed) for run in runs],
        "began": ["" if run.began is None else _moment(run.began) for run in runs],
        "took": ["" if run.seconds is None else format_duration(run.seconds) for run in runs],
        "size": [format_bytes(run.nbytes) for run in runs],
    }
    if any(run.processes > 1 for run in runs):
        columns["processes"] = [str(run.processes) for run in runs]
    for name in DROPPED:
        if _width(columns) > console.width:
            columns.pop(name, None)
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "state", "began") else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    """Characters of a line of the table."""
    return sum(max(map(cell_len, (name, *cells))) for name, cells in columns.items()) + GAP * (len(columns) - 1)


def _moment(time: float) -> str:
    """A Unix time in a few characters: with the year only if it is another one."""
    moment = datetime.fromtimestamp(time)
    return f"{moment:%m-%d %H:%M}" if moment.year == datetime.now().year else f"{moment:%Y-%m-%d}"
