"""The progress of `rptrain export`: a bar on a terminal, or records as JSON."""

import sys
import time

from rich.console import Console

from rptrain.checkpoint.export_progress import Phase, record
from rptrain.utils.console import TerminalBar
from rptrain.utils.text import is_terminal, one_line
from rptrain.utils.units import format_bytes

PAUSE = 0.2  # seconds between two records of a phase


class ExportDisplay(TerminalBar):
    """Shows the progress of an export: as records on standard output, or as a bar on a terminal's standard error."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._last: tuple[Phase | None, float] = (None, 0.0)  # what was shown, and when
        super().__init__(Console(stderr=True), shown=not as_json and is_terminal(sys.stderr))

    def tell(self, said: str) -> None:
        """A sentence that names the state that is exported."""
        if self._as_json:
            print(record(phase="found", state=said), flush=True)
        elif self._has_bar:
            self.note(said)
        else:
            print(one_line(said), file=sys.stderr, flush=True)

    def report(self, phase: Phase, done: int, total: int) -> None:
        """The bytes that are written of those to write; `total` is 0 until it is known."""
        now = time.monotonic()
        if phase == self._last[0] and done < total and now - self._last[1] < PAUSE:
            return
        self._last = phase, now
        if self._as_json:
            print(record(phase=phase, bytes=done, total=total), flush=True)
        else:
            size = f"  {format_bytes(done)} of {format_bytes(total)}" if total else ""
            self._draw(f"{phase}{size}", done, total or None)
