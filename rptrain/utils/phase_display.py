"""The display of long phases: a bar on a terminal, a line every ten seconds elsewhere."""

import os
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console

from rptrain.utils.console import TerminalBar
from rptrain.utils.console import console as standard_console
from rptrain.utils.phases import Phase, current

LONG = 10.0  # seconds after which a phase that has ended has a line
PERIOD = 10.0  # seconds between two lines of a phase outside a terminal
PERIOD_KEY = "RPTRAIN_PHASE_PERIOD"  # of the environment: another PERIOD, which the interface sets; 0: no lines
POLL = 0.25  # seconds between two updates
PARTS = 1000  # of the bar


class PhaseDisplay(TerminalBar):
    """Shows the phase that the process is in, once it has lasted SHORT seconds. The bar is erased when it ends.

    Context manager: owns a thread, which polls the phases. By default, it shows them on standard error.
    """

    def __init__(
        self,
        *,
        shown: bool = True,
        console: Console | None = None,
        transient: bool = True,
        environment: Mapping[str, str] = os.environ,
        copy: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(console or standard_console(stderr=True), shown=shown, transient=transient, copy=copy)
        self._period = float(environment.get(PERIOD_KEY, PERIOD))
        self._at: Phase | None = None  # the phase that was shown last
        self._root: Phase | None = None  # of the last line
        self._next = 0.0  # when the next line of this root is due
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._main, name="phases", daemon=True)
        self._looking = threading.Lock()

    def poll(self) -> None:
        """Show the current phase."""
        with self._looking:
            before, now = self._at, current()
            if before is not None and before is not now and before.ended is not None:
                self._at = None
                if (
                    before.complete
                    and before.seconds >= LONG
                    and not before.repeats
                    and (self._has_bar or self._period)
                ):
                    self.note(before.summary())
            if self._has_bar and (now or before) is not None:
                self._draw_phase(now)
            elif not self._has_bar and self._period and now is not None and self._is_due(now):
                self.note(now.sentence())
            self._at = now or self._at

    def _draw_phase(self, now: Phase | None) -> None:
        """Draws the bar, or erases it after the last phase."""
        if now is None:
            self._hide()
            return
        share = now.fraction
        self._draw(now.sentence(), int(PARTS * (share or 0)), None if share is None else PARTS)
        self._show()

    def _is_due(self, now: Phase) -> bool:
        """Whether a line is due: at once for the first phase of a root, else every period; the first one of a phase
        that repeats after a period.
        """
        moment = monotonic()
        if now.repeats and now.seconds < self._period:
            return False
        if now.root is self._root and moment < self._next:
            return False
        self._root, self._next = now.root, moment + self._period
        return True

    def _main(self) -> None:
        while not self._ending.wait(POLL):
            self.poll()

    def __enter__(self) -> Self:
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self.poll()
        self._hide()
