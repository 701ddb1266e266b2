"""The console on which commands print, and the bar below what they print."""

import os
import sys
from types import TracebackType
from typing import Self

from rich.console import Console

from rptrain.utils.text import is_terminal

ENDLESS = 100_000  # columns: no line is that long
WIDEST = 24  # columns of a bar; a narrow terminal has less of it, and the whole text


def output() -> Console:
    """Standard output. Lines are wrapped and cells of tables cut to the width of a terminal, or to that of the
    variable COLUMNS; a pipe or a file gets them whole.
    """
    whole = not is_terminal(sys.stdout) and "COLUMNS" not in os.environ
    return Console(highlight=False, width=ENDLESS if whole else None)


class TerminalBar:
    """A bar of progress, which stays the last line of a terminal; nothing elsewhere, or if not `shown`.

    What is printed while the context lasts, also by others, appears above it.
    """

    def __init__(self, console: Console, total: int | None = None, *, shown: bool = True) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        columns = (
            BarColumn(None, table_column=Column(max_width=WIDEST)),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Progress(*columns, console=console) if shown and console.is_terminal else None
        self._task = self._bar.add_task("", total=total) if self._bar else None

    @property
    def _has_bar(self) -> bool:
        return self._bar is not None

    def _draw(self, text: str, done: int, total: int | None) -> None:
        """`total`: None while it is unknown."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, description=text)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
