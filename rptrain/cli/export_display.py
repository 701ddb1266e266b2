"""The progress of `rptrain export`: its phases on standard error, or records as JSON."""

import time

from rptrain.checkpoint.export_progress import Phase, record
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.text import one_line

PAUSE = 0.2  # seconds between two records of a phase


class ExportDisplay(PhaseDisplay):
    """Shows the progress of an export: as records on standard output, or its phases on standard error."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._last: tuple[Phase | None, float] = (None, 0.0)  # what was shown, and when
        super().__init__(shown=not as_json)

    def tell(self, said: str) -> None:
        """A sentence that names the state that is exported."""
        if self._as_json:
            print(record(phase="found", state=said), flush=True)
        else:
            self.note(one_line(said))

    def report(self, phase: Phase, done: int, total: int) -> None:
        """The bytes that are written of those to write; `total` is 0 until it is known."""
        if not self._as_json:
            return
        now = time.monotonic()
        if phase == self._last[0] and done < total and now - self._last[1] < PAUSE:
            return
        self._last = phase, now
        print(record(phase=phase, bytes=done, total=total), flush=True)
