"""The thread in C that ends a process, even while a native call holds the interpreter lock (watchdog.c)."""

from ctypes import CDLL, byref, c_char_p, c_double, c_int
from dataclasses import dataclass
from enum import IntEnum
from os import strerror
from pathlib import Path

from rptrain.utils import liveness, native


class Ending(IntEnum):
    """What ends the process: no progress for too long, or the third signal. The numbers are those of watchdog.c."""

    STALLED = 0
    INTERRUPTED = 1


@dataclass(frozen=True)
class LastRecord:
    """A line to append to the file at `path`: `before`, the time in seconds since 1970, and `after`."""

    path: Path
    before: str
    after: str


class NativeWatchdog:
    """Ends the process as prepared. There is one for a process, and it lives as long as the process does."""

    def __init__(self, library: CDLL) -> None:
        self._start, self._limit, self._prepare = (
            library.watchdog_start,
            library.watchdog_limit,
            library.watchdog_prepare,
        )
        self._limit.argtypes, self._limit.restype = [c_double, c_double, c_int], None
        self._prepare.argtypes, self._prepare.restype = [c_int, c_int, *[c_char_p] * 4], None

    @classmethod
    def load(cls) -> "NativeWatchdog | None":
        """None if the package was installed without a compiler."""
        library = native.library("rptrain.utils._watchdog")
        return None if library is None else cls(library)

    def start(self, signals: int) -> None:
        """Start the thread. `signals` is a pipe from which it reads the numbers of signals."""
        if error := self._start(signals, byref(liveness.last_progress)):
            raise OSError(error, strerror(error))

    def limit(self, seconds: float, until_stacks: float, stack_signal: int) -> None:
        """Set the seconds without progress after which the process is ended, and those after which it gets the signal
        that shows stacks; 0: never. Time for which the whole process was stopped does not count.
        """
        self._limit(seconds, until_stacks, stack_signal)

    def prepare(self, ending: Ending, code: int, message: str, record: LastRecord | None = None) -> None:
        """Set the exit code, the line on stderr and the record for this ending."""
        lines = (None,) * 3 if record is None else (str(record.path), record.before, record.after)
        texts = (f"\n{message}\n", *lines)
        encoded = [None if text is None else text.encode("utf-8", "surrogateescape") for text in texts]
        self._prepare(ending, code, *encoded)
