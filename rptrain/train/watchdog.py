"""A thread that reports what every thread and stream waits for when training stalls. It never stops training."""

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
    """Writes `stalled-<step>.txt` to the run's folder, once per stall, if `seconds` pass without a heartbeat.

    0 seconds disable it. `waiting` returns what each thread waits for. `emit` is called with an event. `check` raises
    RunDeleted if the run's folder was deleted. Context manager: owns the thread.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path,
        waiting: Callable[[], dict[str, str]],
        emit: Callable[[Event], None],
        check: Callable[[], None],
    ) -> None:
        self._seconds, self._folder, self._waiting, self._emit, self._check = seconds, folder, waiting, emit, check
        self._changed = threading.Condition()
        self._ended = False
        self._last, self._step, self._reported = time.monotonic(), 0, False
        self._thread = threading.Thread(target=self._main, name="watchdog", daemon=True)

    def heartbeat(self, step: int) -> None:
        """Training has reached `step`, or waits on purpose, for example in a pause."""
        with self._changed:
            self._last, self._step, self._reported = time.monotonic(), step, False
            self._changed.notify()

    def _main(self) -> None:
        with self._changed:
            while not self._ended:
                left = self._last + self._seconds - time.monotonic()
                if self._reported:
                    self._changed.wait()
                elif left > 0:
                    self._changed.wait(left)
                else:
                    self._reported = True
                    try:
                        self._check()
                        self._dump()
                    except RunDeleted as error:  # the trainer raises it, too, before its next step
                        log.warning("no step finished for %g seconds, and %s", self._seconds, error)

    def _dump(self) -> None:
        waiting = self._waiting()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"no step finished for {self._seconds:g} seconds; the last one was step {self._step}", ""]
        lines += [f"{name}: {what}" for name, what in sorted(waiting.items())]
        # First the frames of all threads: those of a thread that runs on change while source lines are read.
        stacks = {ident: list(traceback.walk_stack(frame)) for ident, frame in sys._current_frames().items()}
        for ident, stack in stacks.items():
            summary = traceback.StackSummary.extract(reversed(stack))
            lines += ["", f"thread {names.get(ident, ident)}", *summary.format()]
        path = self._folder / f"stalled-{self._step}.txt"
        with suppress(OSError):  # the event says it, too
            path.write_text("\n".join(line.rstrip("\n") for line in lines) + "\n", encoding="utf-8")
        self._emit(Stalled(self._step, self._seconds, str(path), waiting))

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
