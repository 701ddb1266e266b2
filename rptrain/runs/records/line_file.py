"""A file to which lines are appended. A full disk loses only the lines that do not fit."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from os import SEEK_END
from pathlib import Path

from rptrain.utils.errors import RunDeleted, UserError
from rptrain.utils.files import regular
from rptrain.utils.paths import inside
from rptrain.utils.units import format_bytes

_PIECE = 1 << 16  # bytes read at a time to find the end of the last line
SEARCHED = 256 << 20  # bytes at the end of a file in which it is searched


class LineFile:
    """Appends lines without buffering. The owner closes the file and allows one thread at a time.

    `lock` is called with the open file, before anything is changed, and raises if another process may write to it.
    Opening cuts off an incomplete last line that a killed process left. UserError if the path is a pipe or a
    device, or a link that leads out of its folder, or if the end of the file is not lines.
    """

    def __init__(self, path: Path | str, *, lock: Callable[[int], object] | None = None) -> None:
        self._path, self._locked = Path(path), lock is not None
        with ExitStack() as opening:
            within = inside(self._path.parent, self._path.name)
            self._file = opening.enter_context(open(within, "a+b", buffering=0, opener=regular))
            if lock is not None:
                lock(self._file.fileno())
            self.size = self._end_of_lines()  # bytes of complete lines
            if self.size < self._file.seek(0, SEEK_END):
                self._file.truncate(self.size)
            opening.pop_all()  # `close` closes the file
        self._torn = False  # whether an incomplete line may follow them

    def check(self) -> None:
        """RunDeleted if the file was deleted: writes to it would still succeed, but nobody could read them.

        A file with a `lock` must also still be at its path. If another folder took the place of the run's, the run
        would replace files there.
        """
        opened = os.fstat(self._file.fileno())
        if opened.st_nlink == 0 or (self._locked and not self._is_in_place(opened)):
            raise RunDeleted(
                f"the run's folder {self._path.parent} was deleted or moved during training "
                f"({self._path.name} is gone or another file): nothing more can be saved. Start a new run; if the "
                "folder was moved, move it back and resume"
            )

    def _is_in_place(self, opened: os.stat_result) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), opened)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the file system may recover: do not end the run
            return True

    def append(self, line: bytes) -> None:
        """Writes a line, given without its newline. After an OSError the line is lost. RunDeleted as in `check`."""
        self.check()
        if self._torn:
            self._file.truncate(self.size)
        self._torn = True
        rest = memoryview(line + b"\n")
        whole = self.size + len(rest)
        while len(rest) > 0:
            rest = rest[self._file.write(rest) :]
        self.size, self._torn = whole, False

    def clear(self) -> None:
        """Deletes all lines."""
        self._file.truncate(0)
        self.size = 0

    def close(self) -> None:
        self._file.close()

    def _end_of_lines(self) -> int:
        """UserError if the last SEARCHED bytes have no line end: rptrain writes no line that is nearly as long."""
        size = end = self._file.seek(0, SEEK_END)
        while end > 0:
            start = max(0, end - _PIECE)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
            if size - end > SEARCHED:
                raise UserError(
                    f"{self._path} is damaged: its last {format_bytes(SEARCHED)} are not lines; move the file away"
                )
        return 0
