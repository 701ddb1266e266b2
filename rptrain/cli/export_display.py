"""The progress of `rptrain export`: a bar on a terminal, or records as JSON."""

import sys
import time
from types import TracebackType
from typing import Self

from rptrain.checkpoint.export_progress import Phase, record
from rptrain.utils.text import is_terminal
from rptrain.utils.units import format_bytes

PAUSE = 0.2  # seconds between two records of a phase
WIDEST = 32  # columns of the bar


class ExportDisplay:
    """Shows what `report` is told: on standard output as records if `as_json`, else on a terminal's standard error."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._last: tuple[Phase | None, float] = (None, 0.0)  # what was shown, and when
        self._bar = None if as_json or not is_terminal(sys.stderr) else _bar()
        self._task = None if self._bar is None else self._bar.add_task("", total=None)

    def report(self, phase: Phase, done: int, total: int) -> None:
        """The bytes that are written of those to write; `total` is 0 until it is known."""
        now = time.monotonic()
        if phase == self._last[0] and done < total and now - self._last[1] < PAUSE:
            return
        self._last = phase, now
        if self._as_json:
            print(record(phase=phase, bytes=done, total=total), flush=True)
        elif self._bar is not None and self._task is not None:
            size = f"  {format_bytes(done)} of {format_bytes(total)}" if total else ""
            self._bar.update(self._task, total=total or None, completed=done, description=f"{phase}{size}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar():
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    bar, text = BarColumn(None, table_column=Column(max_width=WIDEST)), TextColumn("{task.description}", markup=False)
    return Progress(bar, text, console=Console(stderr=True))
