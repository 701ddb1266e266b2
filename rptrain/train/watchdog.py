"""The watchdog: reports where a process hangs that makes no progress, and ends it.

A thread in Python writes the report. A thread in C (utils/native_watchdog.py) ends the process GRACE seconds later if
the first one cannot run, because a native call holds the interpreter lock, or hangs itself, for example on a dead disk.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from rptrain.config.schema import Engine as EngineConfig
from rptrain.runs.records.events import CheckpointSaved, Event, Failed, Stalled, Stopped, last_record
from rptrain.utils.errors import RunDeleted, UserError
from rptrain.utils.liveness import idle_seconds, progressed
from rptrain.utils.native_watchdog import Ending, NativeWatchdog
from rptrain.utils.paths import inside
from rptrain.utils.signals import INTERRUPTED
from rptrain.utils.text import is_terminal

GRACE = 5.0  # seconds
BLOCKED = 3.0  # seconds until stacks are shown without the interpreter lock
CLOSING = 60.0  # most seconds without progress after the run has ended: nothing can be lost any more
SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides it
POLL = 1.0  # seconds between two checks whether a reported stall is over, and of what is seen after a late wake-up
LATE = 1.0  # seconds by which this thread wakes up late if the process was stopped, or its interpreter lock was held
STACKS = signal.SIGRTMAX - 1  # shows the stacks of all threads

log = logging.getLogger(__name__)


class Stall(RuntimeError):
    """The process made no progress for engine.stall_timeout seconds."""


@dataclass(frozen=True)
class Watched:
    """A run: where to report a stall, and how to record the end of the run.

    `check` raises RunDeleted if the folder was deleted. `fail` writes the last record. `saved` returns the step of the
    last checkpoint, 0 without one. `how_to_resume` returns a sentence that names the checkpoint and the command.
    """

    folder: Path
    events: Path
    emit: Callable[[Event], None]
    check: Callable[[], None]
    fail: Callable[[BaseException], object]
    saved: Callable[[], int]
    how_to_resume: Callable[[], str]


class Watchdog:
    """Reports a stall once: after `seconds` without progress (`rptrain.utils.liveness`).

    It then ends the process if `ends_process` and engine.stall_action is "stop". Context manager, and owns its thread.
    In a process that it ends, the thread lives on after the context, to end a process that cannot close.
    """

    def __init__(self, native: NativeWatchdog | None = None, *, ends_process: bool = False) -> None:
        default = EngineConfig()
        self._native, self._ends_process = native, ends_process
        self._seconds, self._stops = default.stall_timeout, default.stall_action == "stop"
        self._changed = threading.Condition()
        self._phase, self._step = "starting", 0
        self._run: Watched | None = None
        self._folder: Path | None = None  # of the last run
        self._waiting: Callable[[], dict[str, str]] = dict
        self._code: int | None = None  # of the process, once it closes
        self._why = ""  # the message of the run's end
        self._ended = False
        self._abandons = False
        self._cursor = SHOW_CURSOR if is_terminal(sys.stdout) else ""
        self._thread = threading.Thread(target=self._main, name="watchdog", daemon=True)

    def configure(self, seconds: float, action: str) -> None:
        """Set engine.stall_timeout and engine.stall_action."""
        with self._changed:
            self._seconds, self._stops = seconds, action == "stop"
            self._apply()

    @contextmanager
    def watching(self, run: Watched) -> Iterator[None]:
        """Report stalls to this run as long as the context lasts."""
        self._set_run(run)
        try:
            yield
        finally:
            self._set_run(None)

    @contextmanager
    def waiting(self, waiting: Callable[[], dict[str, str]]) -> Iterator[None]:
        """Report what `waiting` returns, by thread or stream, as long as the context lasts."""
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = dict

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Report this phase as long as the context lasts. Its begin and end are progress."""
        before = self._phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(before)

    def heartbeat(self, step: int) -> None:
        """Training has completed `step`, or waits on purpose, for example in a pause."""
        self._step = step
        progressed()

    def hear(self, event: Event) -> None:
        """A listener of the run's records: the message and the record of a third signal name the last checkpoint."""
        if isinstance(event, CheckpointSaved):
            with self._changed:
                self._apply()

    def closing(self, code: int, why: str = "") -> None:
        """The last record is written. From now on a stall ends the process with this code, after CLOSING at most."""
        progressed()
        with self._changed:
            self._code, self._why = code, why or self._why
            self._apply()

    def abandon_threads(self) -> None:
        """Some threads wait for what may never come, and nothing interrupts them: a process of `ends_process` ends
        with the context, without them.
        """
        self._abandons = True

    def __enter__(self) -> Self:
        progressed()
        if self._native is not None and self._ends_process:
            faulthandler.register(STACKS, file=2, all_threads=True)
        with self._changed:
            self._apply()
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ends_process:
            code = getattr(error, "exit_code", 1) if error is not None else 0
            self.closing(code)
            if self._abandons:
                if kind is not None and error is not None and not hasattr(error, "exit_code"):
                    sys.excepthook(kind, error, trace)  # what Python would show
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            return
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    # ---- state; the lock is held

    def _set_run(self, run: Watched | None) -> None:
        with self._changed:
            self._run = run
            self._folder = self._folder if run is None else run.folder
            self._apply()

    def _enter(self, phase: str) -> None:
        progressed()
        with self._changed:
            self._phase = phase
            self._apply()

    @property
    def _limit(self) -> float:
        """Seconds without progress; 0: no limit."""
        return self._seconds if self._code is None else min(self._seconds, CLOSING)

    @property
    def _ends(self) -> bool:
        return self._ends_process and (self._stops or self._code is not None)

    def _stall(self) -> str:
        return f"no progress for {self._limit:g} seconds while {self._phase}"

    def _message(self) -> str:
        if self._code is None:
            return f"{self._stall()}: the process was ended"
        return " ".join(filter(None, (self._why, f"The process did not close within {self._limit:g} seconds")))

    def _apply(self) -> None:
        """Tell both threads what has changed."""
        self._changed.notify()
        self._arm(self._limit or None)
        if self._native is None:
            return
        stalled = interrupted = None
        message = f"{self._cursor}interrupted"
        if self._run is not None and self._code in (None, INTERRUPTED):
            message += f"\n{self._run.how_to_resume()}"
        if self._run is not None and self._code is None:
            stalled = last_record(self._run.events, Failed(self._message()))
            interrupted = last_record(self._run.events, Stopped(self._run.saved(), "signal"))
        code = 1 if self._code is None else self._code
        self._native.prepare(Ending.STALLED, code, self._cursor + self._message(), stalled)
        self._native.prepare(Ending.INTERRUPTED, INTERRUPTED, message, interrupted)
        ends = self._limit if self._ends else 0
        self._native.limit(ends and ends + GRACE, ends and ends + BLOCKED, STACKS)

    # ---- the thread

    def _main(self) -> None:
        reported = False
        while True:
            with self._changed:
                if self._ended:
                    return
                left = self._limit - idle_seconds()
                reported = reported and left <= 0
                if self._limit == 0 or left > 0 or reported:
                    self._wait(None if self._limit == 0 else POLL if reported else left)
                    continue
            reported = True
            try:
                self._report()
            except RunDeleted as error:  # the trainer raises it, too, before its next step
                log.warning("%s, and %s", self._stall(), error)

    def _wait(self, seconds: float | None) -> None:
        self._arm(seconds)
        began = time.monotonic()
        self._changed.wait(seconds)
        if seconds is not None and time.monotonic() - began > seconds + LATE and self._native is not None:
            self._changed.wait(POLL)  # for the thread in C, which knows whether the whole process was stopped

    def _arm(self, seconds: float | None) -> None:
        """Without the thread in C, show stacks and end the process BLOCKED seconds later: this thread may then be
        unable to run.
        """
        if self._native is not None:
            return
        if seconds is not None and self._ends:
            faulthandler.dump_traceback_later(seconds + BLOCKED, exit=True, file=2)
        elif self._ends_process:
            faulthandler.cancel_dump_traceback_later()

    def _report(self) -> None:
        run, waiting = self._run, self._waiting()
        text = self._text(waiting)
        if self._code is not None:
            self._write("closing.txt", text)
            self._end(self._code, text)
        path = None
        if run is not None:
            run.check()
            path = self._write(f"stalled-{self._step}.txt", text)
            run.emit(Stalled(self._step, self._limit, str(path), waiting, self._phase))
        if self._ends:
            if run is not None:
                run.fail(Stall(self._message()))
            self._end(1, text if path is None else f"{path} says what everything waits for\n")

    def _text(self, waiting: dict[str, str]) -> str:
        lines = [f"{self._stall()}; the last step was {self._step}", ""]
        lines += [f"{name}: {what}" for name, what in sorted(waiting.items())]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        # First the frames of all threads: those of a thread that runs on change while source lines are read.
        stacks = {ident: list(traceback.walk_stack(frame)) for ident, frame in sys._current_frames().items()}
        for ident, stack in stacks.items():
            summary = traceback.StackSummary.extract(reversed(stack))
            lines += ["", f"thread {names.get(ident, ident)}", *summary.format()]
        return "\n".join(line.rstrip("\n") for line in lines) + "\n"

    def _write(self, name: str, text: str) -> Path | None:
        """Write a report to the run's folder. Returns None without a folder, or if it cannot be written."""
        if self._folder is None:
            return None
        try:
            path = inside(self._folder, name)
            path.write_text(text, encoding="utf-8")
        except (OSError, UserError):
            return None
        return path

    def _end(self, code: int, text: str) -> NoReturn:
        with suppress(OSError):  # not through sys.stderr, which another thread may hold
            os.write(2, f"{self._cursor}\n{self._message()}\n{text}".encode(errors="replace"))
        os._exit(code)
