"""A thread that tells what every thread and stream waits for when no step ends for too long. Training is left alone."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rptrain.runs.events import Event, Stalled
from rptrain.utils.errors import RunDeleted

log = logging.getLogger(__name__)


class Watchdog:
    """Writes `stalled-<step>.txt` into the run's folder once `seconds` (0: never) passed since the last `alive`.

    Once for each stall. `waiting` says which thread waits for what; `tell` is called with a record. `check` raises
    RunDeleted once the folder is gone. Context manager.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path,
        waiting: Callable[[], dict[str, str]],
        tell: Callable[[Event], None],
        check: Callable[[], None],
    ) -> None:
        self._seconds, self._folder, self._waiting, self._tell, self._check = seconds, folder, waiting, tell, check
        self._changed = threading.Condition()
        self._ended = False
        self._last, self._step, self._told = time.monotonic(), 0, False
        self._thread = threading.Thread(target=self._main, name="watchdog", daemon=True)

    def alive(self, step: int) -> None:
        """Training is at `step`, or waits for what it was told to wait for."""
        with self._changed:
            self._last, self._step, self._told = time.monotonic(), step, False
            self._changed.notify()

    def _main(self) -> None:
        with self._changed:
            while not self._ended:
                left = self._last + self._seconds - time.monotonic()
                if self._told:
                    self._changed.wait()
                elif left > 0:
                    self._changed.wait(left)
                else:
                    self._told = True
                    try:
                        self._check()
                        self._dump()
                    except RunDeleted as error:  # which ends the run as soon as the trainer's thread can find out
                        log.warning("no step ended for %g seconds, and %s", self._seconds, error)

    def _dump(self) -> None:
        waiting = self._waiting()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"no step ended for {self._seconds:g} seconds; the last was {self._step}", ""]
        lines += [f"{name}: {what}" for name, what in sorted(waiting.items())]
        for ident, frame in sys._current_frames().items():
            lines += ["", f"thread {names.get(ident, ident)}", *traceback.format_stack(frame)]
        path = self._folder / f"stalled-{self._step}.txt"
        with suppress(OSError):  # what waits is told all the same
            path.write_text("\n".join(line.rstrip("\n") for line in lines) + "\n", encoding="utf-8")
        self._tell(Stalled(self._step, self._seconds, str(path), waiting))

    def __enter__(self) -> Self:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._seconds:
            self._thread.join()
