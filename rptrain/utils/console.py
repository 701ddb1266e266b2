"""The console on which commands print, and the bar below what they print."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console

from rptrain.utils import hidden_cursor
from rptrain.utils.text import is_terminal, printable

ENDLESS = 100_000  # columns: no line is that long
WIDEST = 24  # columns of a bar; a narrow terminal has less of it, and the whole text


def console(*, stderr: bool = False, highlight: bool = True, width: int | None = None) -> Console:
    """Standard output or error, as wide as the terminal, or as the variable COLUMNS if that is a positive integer."""
    return Console(stderr=stderr, highlight=highlight, width=width, _environ=_environment())


def output() -> Console:
    """Standard output. Lines are wrapped and cells of tables cut to the width of a terminal, or to that of the
    variable COLUMNS; a pipe or a file gets them whole.
    """
    whole = not is_terminal(sys.stdout) and "COLUMNS" not in _environment()
    return console(highlight=False, width=ENDLESS if whole else None)


def _environment() -> Mapping[str, str]:
    """The environment without a COLUMNS that is not a positive integer: rich takes 0 for the width."""
    columns = os.environ.get("COLUMNS", "1")
    if columns.isdecimal() and int(columns) > 0:
        return os.environ
    return {name: value for name, value in os.environ.items() if name != "COLUMNS"}


class TerminalBar:
    """A bar of progress, which stays the last line of a terminal; nothing elsewhere, or if not `shown`.

    What is printed while the context lasts, also by others, appears above it. `transient`: it is erased at the end.
    `copy` is called with every line that `note` prints, or would print if it were `shown`.
    """

    def __init__(
        self,
        console: Console,
        total: int | None = None,
        *,
        shown: bool = True,
        transient: bool = False,
        copy: Callable[[str], object] | None = None,
    ) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        columns = (
            BarColumn(None, table_column=Column(max_width=WIDEST)),
            TextColumn("{task.description}", markup=False),
        )
        self._console, self._shown, self._copy = console, shown, copy or (lambda text: None)
        has_bar = shown and console.is_terminal
        redirects = is_terminal(sys.stdout)  # above the bar; results in a pipe stay there
        self._bar = None
        if has_bar:
            self._bar = Progress(*columns, console=console, transient=transient, redirect_stdout=redirects)
        self._task = self._bar.add_task("", total=total) if self._bar else None

    @property
    def _has_bar(self) -> bool:
        return self._bar is not None

    def _draw(self, text: str, done: int, total: int | None) -> None:
        """`total`: None while it is unknown."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, description=text)

    def _show(self) -> None:
        if self._bar is not None and not self._bar.live.is_started:
            with suppress(OSError, ValueError):  # a file without a descriptor
                hidden_cursor.descriptors.add(self._console.file.fileno())
            self._bar.start()

    def _hide(self) -> None:
        if self._bar is not None and self._bar.live.is_started:
            self._bar.stop()
            with suppress(OSError, ValueError):
                hidden_cursor.descriptors.discard(self._console.file.fileno())

    def note(self, text: str) -> None:
        """Prints a line, above the bar if there is one. The work continues if the line cannot be printed."""
        self._copy(text)
        if self._shown:
            try:
                self._console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
            except OSError:  # the disk is full: a later line may succeed
                return
            except SystemExit:  # rich exits if the output pipe was closed
                self._shown = False

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hide()
