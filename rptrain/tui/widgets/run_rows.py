"""A run as a row of the list of runs, with as many columns as fit."""

import time
from collections.abc import Iterator

from rich.cells import cell_len
from textual.content import Content

from rptrain.runs.listing import Summary
from rptrain.tui.widgets.run_head import state_text
from rptrain.utils.text import clipped, one_line
from rptrain.utils.units import format_ago, format_bytes, format_duration, format_loss

COLUMNS = (  # name, width, and the least width of the list that shows it
    ("state", 12, 0),
    ("steps", 13, 0),
    ("loss", 9, 0),
    ("took", 11, 0),
    ("size", 10, 76),
    ("began", 13, 100),
    ("model", 26, 116),
)
MARK = 2
NAME = 16  # minimum width
LONGEST = 62  # maximum width: a name of 60 characters


def heading(width: int) -> Content:
    """The names of the columns."""
    name, columns = _layout(width)
    text = f"{'':{MARK}}{'run':<{name}}" + "".join(f"{column:<{room}}" for column, room in columns)
    return Content.styled(text, "$muted")


def row(run: Summary, width: int, mark: str) -> Content:
    """`mark`: the color of the run's curve if it is compared."""
    name, columns = _layout(width)
    cells = dict(_cells(run))
    shown = clipped(one_line(run.path.name), name - 1)
    return Content.assemble(
        ("━ " if mark else "  ", mark),
        (shown + " " * (name - cell_len(shown)), "bold"),
        *(_padded(cells[column], room) for column, room in columns),
    )


def _layout(width: int) -> tuple[int, list[tuple[str, int]]]:
    columns = [(name, room) for name, room, least in COLUMNS if width >= least]
    return max(NAME, min(LONGEST, width - MARK - sum(room for _, room in columns))), columns


def _cells(run: Summary) -> Iterator[tuple[str, Content]]:
    total = "" if run.total_steps is None else f"/{run.total_steps:,}"
    yield "state", state_text(run.state)
    yield "steps", Content(f"{run.step:,}{total}")
    yield "loss", Content(format_loss(run.loss))
    yield "took", Content("" if run.seconds is None else format_duration(run.seconds))
    yield "size", Content(format_bytes(run.nbytes))
    yield "began", Content("" if run.began is None else format_ago(time.time() - run.began))
    several = f", {run.processes} processes" if run.processes > 1 else ""
    yield "model", Content.styled(one_line(run.model) + several, "$muted")


def _padded(cell: Content, room: int) -> Content:
    if cell.cell_length >= room:
        cell = cell[: room - 2] + Content("…")
    return cell + Content(" " * (room - cell.cell_length))
