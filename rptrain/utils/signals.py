"""The signals that end a process: the first asks, the second interrupts, the third ends it whatever its threads do.

`timeout`, and whoever signals a process and then its group, sends one signal twice within milliseconds; a terminal that
closes, or a system that shuts down, sends two kinds. So signals within TOGETHER seconds of the last one that counted
count as that one, here and in utils/watchdog.c.
"""

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from ctypes import CDLL
from types import FrameType
from typing import Any

from rptrain.utils import hidden_cursor
from rptrain.utils.native import library as native_library
from rptrain.utils.native_watchdog import Ending, NativeWatchdog
from rptrain.utils.phases import phase

INTERRUPTED = 130  # the exit code
THIRD = 3  # the signal that ends the process
TOGETHER = 0.2  # seconds, as in utils/watchdog.c
AGAIN = 0.005  # seconds until an interrupt is tried again


class Signals:
    """Handles SIGINT, SIGTERM, and SIGHUP unless it was ignored (as by nohup), all in the same way.

    A signal raises KeyboardInterrupt in the main thread, but the first one does not while it is `deferred`. The third
    ends the process at once with INTERRUPTED. There is one object for a process, `PROCESS`.
    """

    def __init__(self) -> None:
        self.received = 0
        self.first = self._last = -math.inf  # when the first and the last signal were counted, by `time.monotonic`
        self.installed = False  # for the rest of the process
        self._handled = False
        self._message: bytes | None = None  # says that the first signal was deferred
        self._deferred = False
        self._at_once = False  # the first signal ends the process
        self._third_ends = True
        self._shields = 0
        self.native: NativeWatchdog | None = None

    def install(self, native: NativeWatchdog | None) -> None:
        """Handle signals for the rest of the process. With `native`, the third ends it also while a native call holds
        the interpreter lock or while the interpreter ends. Call it in the main thread, once. Until `begin`, the first
        signal ends the process.
        """
        kinds = [*self._set_handlers()]
        self.installed = self._at_once = True
        if native is None:
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        native.prepare(Ending.INTERRUPTED, INTERRUPTED, "interrupted")
        native.start(reading)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self.native = native

        if (forwarding := native_library("rptrain.utils._signals")) is not None:
            atexit.register(_forward, forwarding, kinds, writing)

    def begin(self) -> None:
        """From now on, the first signal does not end the process at once: a command begins, and handles it."""
        self._at_once = False

    def close(self) -> None:
        """Raise no KeyboardInterrupt any more if signals are handled for the rest of the process, which ends."""
        if not self.installed:
            return
        self._shields += 1
        # If a KeyboardInterrupt has ended code that was compiled from a string, as dataclasses do, `python -m` ends the
        # process by SIGINT, whatever its status. The next such code makes it forget that.
        exec("")

    @contextmanager
    def handled(self, *, third_ends: bool = True) -> Iterator[None]:
        """Handle signals as long as the context lasts, unless they are `install`ed. Not in other threads than the main
        one, which alone may set handlers. Without `third_ends`, the third signal is as the second: the process is not
        ours to end, as in a notebook.
        """
        if self._handled or threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self._third_ends = self._set_handlers(), third_ends
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
            self._handled, self._third_ends, self.received = False, True, 0

    @contextmanager
    def starting(self) -> Iterator[None]:
        """End the process at the first signal as long as the context lasts: a program starts that handles signals
        itself, later.
        """
        with self.handled():
            self._at_once = True
            try:
                yield
            finally:
                self._at_once = False

    @contextmanager
    def importing(self) -> Iterator[None]:
        """End the process at the first signal while modules are imported, if signals are handled for the rest of it.
        Otherwise, as in a notebook, the first is deferred: a module that is half imported would stay unusable.

        Native code may abort where an import is interrupted, and callbacks may lose the exception. There is nothing
        to close yet.
        """
        is_main = threading.current_thread() is threading.main_thread()
        defers = is_main and self._handled and not self.installed and not self._deferred
        before, self._at_once = self._at_once, self.installed
        try:
            with phase("loading libraries", unit=""), self.deferred() if defers else nullcontext():
                yield
        finally:
            self._at_once = before

    @contextmanager
    def deferred(self, message: str | None = None) -> Iterator[None]:
        """Do not raise KeyboardInterrupt for the first signal before the context ends. `message` is then shown."""
        self._message, self._deferred = None if message is None else f"\n{message}\n".encode(), True
        try:
            yield
        finally:
            self._deferred = False
        self.check()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Raise no KeyboardInterrupt as long as the context lasts: the first and the second signal are only counted."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was received."""
        if self.received:
            raise KeyboardInterrupt

    def _set_handlers(self) -> dict[signal.Signals, Any]:
        kinds = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            kinds.append(signal.SIGHUP)
        self.received, self._handled = 0, True
        self._last = -math.inf
        return {kind: signal.signal(kind, self._handle) for kind in kinds}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last < TOGETHER:
            return
        self._last = now
        self.received += 1
        if self.received == 1:
            self.first = now
        if self.received >= THIRD and self.native is None and self._third_ends:
            hidden_cursor.restore()
            os._exit(INTERRUPTED)
        if self._shields:
            return
        if self._at_once:
            hidden_cursor.restore()
            with suppress(OSError):
                os.write(2, b"\ninterrupted\n")
            os._exit(INTERRUPTED)
        if self.received > 1 or not self._deferred:
            self._interrupt(number, frame)
            return
        if self._message is not None:
            with suppress(OSError):  # not through the progress display: the signal may interrupt it
                os.write(2, self._message)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, but not in `__del__`, which would lose it: then try again soon.

        The timer is used only if signals are handled for the rest of the process, which then owns it.
        """
        if self._shields:
            return
        if self.installed and _is_deleting(frame):
            signal.signal(signal.SIGALRM, self._interrupt)
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
            return
        raise KeyboardInterrupt


def _is_deleting(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _forward(library: CDLL, kinds: Sequence[signal.Signals], pipe: int) -> None:
    """Write signals to the pipe without Python. For signals that Python handles, the interpreter restores the default
    actions at its end, and one that comes then would end a finished process with another status.
    """
    for kind in kinds:
        signal.signal(kind, signal.SIG_IGN)
        library.signals_forward(int(kind), pipe)


PROCESS = Signals()
