"""The display of reading data: a bar on a terminal, a line every few seconds elsewhere."""

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console

from rptrain.data.progress import ReadProgress
from rptrain.utils.console import TerminalBar

SHORT = 1.0  # seconds of reading that show no bar
LONG = 10.0  # seconds after which a file that was read has a line
PERIOD = 10.0  # seconds between two lines where there is no terminal
PERIOD_KEY = "RPTRAIN_READING_PERIOD"  # of the environment: another PERIOD, which the interface sets
PARTS = 1000  # of the bar


class ReadingDisplay(TerminalBar):
    """Shows how far data is read, nothing if `quiet` or if it takes no time. The bar is erased at the end."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        super().__init__(console or Console(), shown=not quiet, transient=True)
        self._clock = clock
        self._period = float(environment.get(PERIOD_KEY, PERIOD))
        self._next: float | None = None  # when the bar begins, or the next line is printed

    def report(self, reading: ReadProgress) -> None:
        """Show this, if it is time."""
        now = self._clock()
        if self._next is None:
            self._next = now - reading.seconds + (SHORT if self._has_bar else self._period)
        if reading.done and reading.seconds >= LONG:
            self.note(reading.summary())
        elif now >= self._next and not self._has_bar:
            self._next = max(self._next, now - self._period) + self._period
            self.note(reading.sentence())
        if now >= self._next and self._bar is not None:
            share = reading.share
            self._draw(reading.sentence(), int(PARTS * (share or 0)), None if share is None else PARTS)
            self._bar.start()

    def __enter__(self) -> Self:
        """The bar begins with the first report that is shown."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None and self._bar.live.is_started:
            self._bar.stop()
