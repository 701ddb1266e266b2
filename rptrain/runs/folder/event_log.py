"""The log of a run (`events.jsonl`): appends records, one process at a time, and finds single ones."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from os import SEEK_END
from pathlib import Path
from types import TracebackType
from typing import Self

from rptrain.runs.records.events import NAMES, CheckpointSaved, Event, Finished, RecordsLost, from_line, to_line
from rptrain.runs.records.line_file import LineFile
from rptrain.runs.view.run_view import RunView
from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular
from rptrain.utils.locks import lock

_log = logging.getLogger(__name__)
_TAIL = 4096  # bytes: more than the last records of a run take


def check_not_training(path: Path) -> None:
    """UserError if a process trains a run, or if its log cannot be read. Writes nothing."""
    try:
        with open_regular(path) as file:
            _lock_log(path, file.fileno(), shared=True)
    except BlockingIOError:
        raise _training(path) from None
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; make it readable, or start a new run") from error


def is_finished(path: Path | str) -> bool:
    """Whether the last record is `finished`. Only that record is read."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, SEEK_END) - _TAIL))
        *lines, _ = file.read().split(b"\n")
    try:
        return bool(lines) and isinstance(from_line(lines[-1]), Finished)
    except UserError:
        return False


def has_saved(path: Path | str) -> bool:
    """Whether a record says that a checkpoint was saved."""
    start = to_line(CheckpointSaved(step=0, path="")).partition(",")[2].partition(",")[0].encode()
    with open_regular(path) as file:
        return any(start in line for line in iter(partial(file.readline, _TAIL), b""))


def _lock_log(path: Path | str, descriptor: int, *, shared: bool = False) -> str | None:
    """Locks the log of a run. Returns why its file system has no locks; None if it has.

    BlockingIOError if another process trains the run. Without locks, the run's records say whether its last process
    still does.
    """
    reason = lock(descriptor, shared=shared)
    if reason is not None:
        view = RunView(Path(path).parent)
        if view.process is not None and not view.ended:
            raise BlockingIOError
    return reason


def _training(path: Path | str) -> UserError:
    return UserError(f"{path}: another process is training this run")


class EventLog:
    """Appends records to a file without buffering. Threads may share it. Context manager.

    A record that cannot be written does not end the run. Lost records are counted, and a `RecordsLost` with their
    number is written as soon as writing succeeds again. `write` raises RunDeleted if the file was deleted. Opening cuts
    off an incomplete last line that a killed process left, and raises UserError if another process holds the file: only
    one process trains a run at a time. `no_locks` says why the file system has no locks; None if it has. Without locks,
    another process is noticed by its records, but not if both begin at once.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self.no_locks: str | None = None
        try:
            self._file = LineFile(path, lock=self._lock_file)
        except BlockingIOError:
            raise _training(path) from None
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror}; make it writable, or start a new run"
            ) from error
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Event], None]] = []
        self._lost, self._reason = 0, ""
        self._ended = False

    def _lock_file(self, descriptor: int) -> None:
        self.no_locks = _lock_log(self._path, descriptor)

    def write(self, event: Event) -> None:
        self._write(event, last=False)

    def end(self, event: Event) -> None:
        """Writes the last record. Later ones are only logged, since the last one says how the run ended."""
        self._write(event, last=True)

    def _write(self, event: Event, *, last: bool) -> None:
        with self._lock:
            if self._ended:
                _log.warning("after the end of the run: %s", event.sentence() or NAMES[type(event)])
                return
            try:
                if self._lost:
                    self._file.append(to_line(RecordsLost(self._lost, self._reason)).encode())
                    self._lost = 0
                self._file.append(to_line(event).encode())
            except OSError as error:
                self._lose(error)
            self._ended = last
        for listener in self._listeners:
            listener(event)

    def check(self) -> None:
        """RunDeleted if the run's folder was deleted or moved: another folder in its place must not be written to."""
        self._file.check()

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Calls the listener with every later record, after it was written."""
        self._listeners.append(listener)

    def close(self) -> None:
        if self._lost:
            _log.warning("%s lacks the last %d records", self._path, self._lost)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _lose(self, error: OSError) -> None:
        if not self._lost:
            _log.warning("%s cannot be written: %s. The run continues without records", self._path, error.strerror)
        self._lost, self._reason = self._lost + 1, str(error.strerror)
