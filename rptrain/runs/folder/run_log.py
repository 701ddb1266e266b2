"""The log file of a run (`run.log`): the lines that a terminal shows, each with its time."""

import logging
from pathlib import Path
from time import time
from types import TracebackType
from typing import Self

from rptrain.runs.records.line_file import LineFile
from rptrain.utils.errors import RunDeleted, UserError
from rptrain.utils.text import printable
from rptrain.utils.units import format_moment

FILE = "run.log"

_log = logging.getLogger(__name__)


class RunLog(logging.Handler):
    """Appends lines to the file of a run, once it is opened; until then, they are kept. Threads may share it.

    Context manager: meanwhile it also writes the warnings that rptrain logs. The run does not depend on the file: that
    it cannot be written is logged once, and lines are lost until it can.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._path = Path(FILE)
        self._file: LineFile | None = None
        self._kept: list[tuple[float, str]] | None = []
        self._noted = False
        # A failure to write is logged, which takes the lock of records. With another lock for lines, one thread could
        # hold the one and wait for the other.
        assert self.lock is not None
        self._writing = self.lock

    def open(self, folder: Path) -> None:
        """Open the file in the run's folder, and write what was kept."""
        with self._writing:
            self._path, kept, self._kept = folder / FILE, self._kept or [], None
            try:
                self._file = LineFile(self._path)
            except (OSError, UserError) as error:
                self._note(error)
            for moment, text in kept:
                self._append(moment, text)

    def write(self, text: str) -> None:
        """Write a text, whose lines all get the time of now."""
        with self._writing:
            if self._kept is None:
                self._append(time(), text)
            else:
                self._kept.append((time(), text))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning, and show it as without this handler."""
        self.write(record.getMessage())
        others = {*_root().handlers, *logging.getLogger().handlers} - {self}
        if logging.lastResort is not None and not others:
            logging.lastResort.handle(record)

    def __enter__(self) -> Self:
        _root().addHandler(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _root().removeHandler(self)
        with self._writing:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _append(self, moment: float, text: str) -> None:
        if self._file is None:
            return
        try:
            for line in printable(text).split("\n"):
                self._file.append(f"{format_moment(moment)}  {line}".encode())
        except (OSError, RunDeleted) as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        if not self._noted:
            self._noted = True
            deleted = isinstance(error, RunDeleted)  # perhaps the file alone
            reason = "it was deleted" if deleted else error.strerror if isinstance(error, OSError) else error
            _log.warning("%s cannot be written: %s. The run continues without it", self._path, reason)


def _root() -> logging.Logger:
    return logging.getLogger("rptrain")
