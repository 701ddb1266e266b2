"""A run as a row of the list of runs, with as many columns as fit, and the order of the rows."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from rich.cells import cell_len
from textual.content import Content

from rptrain.runs.folder.listing import Summary
from rptrain.tui.widgets.run_state import state_text
from rptrain.utils.text import clipped, one_line
from rptrain.utils.units import format_ago, format_bytes, format_duration, format_loss, format_speed

BEST = "best val."  # the lowest validation loss
COLUMNS = {  # widths; the first ones stay on narrow screens
    "state": 12,
    "steps": 13,
    "loss": 9,
    BEST: 12,
    "tokens/s": 11,
    "took": 11,
    "size": 10,
    "began": 13,
    "model": 20,
}
MARK = 2
NAME = 16  # minimum width
PREFERRED = 32  # width of longer names, before there are columns behind FIRST
FIRST = ("state", "steps", "loss")
LONGEST = 62  # maximum width: a name of 60 characters
ARROWS = ("▲", "▼")  # the lowest first, the highest first

KEYS: dict[str, Callable[[Summary], float | str | None]] = {  # None is last in both directions
    "run": lambda run: run.path.name.casefold(),
    "state": lambda run: run.state,
    "steps": lambda run: run.step,
    "loss": lambda run: run.loss,
    BEST: lambda run: run.best_loss,
    "tokens/s": lambda run: run.tokens_per_second,
    "took": lambda run: run.seconds,
    "size": lambda run: run.nbytes,
    "began": lambda run: run.began,
    "model": lambda run: run.model.casefold() or None,
}
HIGHEST_FIRST = ("steps", "tokens/s", "took", "size", "began")


@dataclass(frozen=True)
class Order:
    """The column by which runs are sorted, and the direction."""

    column: str = "began"
    down: bool = True  # the highest first

    @classmethod
    def by(cls, column: str) -> "Order":
        return cls(column, column in HIGHEST_FIRST)

    @property
    def reversed(self) -> "Order":
        return replace(self, down=not self.down)

    @property
    def arrow(self) -> str:
        return ARROWS[self.down]

    def sorted(self, runs: Iterable[Summary]) -> list[Summary]:
        """The runs in this order. Runs with equal values keep their order."""
        runs = list(runs)
        keys = {run.path: KEYS[self.column](run) for run in runs}
        known = [run for run in runs if keys[run.path] is not None]
        known.sort(key=lambda run: keys[run.path], reverse=self.down)  # pyright: ignore[reportArgumentType]
        return known + [run for run in runs if keys[run.path] is None]


@dataclass(frozen=True)
class Mark:
    """The letter and the color of a compared run and of its curve; empty for a run that is not compared."""

    letter: str = ""
    style: str = ""


@dataclass(frozen=True)
class Layout:
    """The width of the names, and the other columns with their widths."""

    name: int
    columns: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, width: int, longest: int, *, validated: bool = True) -> "Layout":
        """For a list of `width` characters and names of at most `longest`. `validated`: runs have validation losses."""
        left = width - MARK - NAME
        preferred = max(0, min(longest + 2, PREFERRED) - NAME)
        columns: list[tuple[str, int]] = []
        offered = {name: size for name, size in COLUMNS.items() if validated or name != BEST}
        for name, size in offered.items():
            if size > left - (0 if name in FIRST else preferred):
                break
            columns.append((name, size))
            left -= size
        extra = max(0, min(left, min(longest + 2, LONGEST) - NAME))
        if len(columns) == len(offered):  # the last one takes what is left
            columns[-1] = columns[-1][0], columns[-1][1] + left - extra
        return cls(NAME + extra, tuple(columns))

    def heading(self, order: Order) -> Content:
        """The names of the columns; that of the order is marked."""
        shown = "run" if order.column in ("run", *dict(self.columns)) else f"run · {order.column} {order.arrow}"
        parts = [" " * MARK]
        for name, size in (("run", self.name), *self.columns):
            text = f"{name} {order.arrow}" if name == order.column else shown if name == "run" else name
            parts.append(f"{text:<{size}}")
        return Content.styled("".join(parts), "$muted")

    def column_at(self, x: int) -> str | None:
        """The column of the heading at a place; None beyond the last."""
        end = MARK
        for name, size in (("run", self.name), *self.columns):
            end += size
            if x < end:
                return name
        return None

    def row(self, run: Summary, mark: Mark) -> Content:
        cells = dict(_cells(run))
        shown = clipped(one_line(run.path.name), self.name - 1)
        return Content.assemble(
            (f"{mark.letter:<{MARK}}", mark.style),
            (shown + " " * (self.name - cell_len(shown)), "bold"),
            *(_padded(cells[column], size) for column, size in self.columns),
        )


def ago(run: Summary) -> str:
    """When it began."""
    return "" if run.began is None else format_ago(time.time() - run.began)


def matches(run: Summary, text: str) -> bool:
    """Whether each word of a text occurs in the run's name, state or model."""
    about = f"{run.path.name} {run.state} {run.model}".casefold()
    return all(word in about for word in text.casefold().split())


def _cells(run: Summary) -> Iterator[tuple[str, Content]]:
    total = "" if run.total_steps is None else f"/{run.total_steps:,}"
    yield "state", state_text(run.state)
    yield "steps", Content(f"{run.step:,}{total}")
    yield "loss", Content(format_loss(run.loss))
    yield BEST, Content("" if run.best_loss is None else format_loss(run.best_loss))
    yield "tokens/s", Content(format_speed(run.tokens_per_second))
    yield "took", Content("" if run.seconds is None else format_duration(run.seconds))
    yield "size", Content(format_bytes(run.nbytes))
    yield "began", Content(ago(run))
    several = f", {run.processes} processes" if run.processes > 1 else ""
    yield "model", Content.styled(one_line(run.model) + several, "$muted")


def _padded(cell: Content, size: int) -> Content:
    if cell.cell_length >= size:
        cell = cell[: size - 2] + Content("…")
    return cell + Content(" " * (size - cell.cell_length))
