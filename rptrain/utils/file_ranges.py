"""Reading of byte ranges of a file into memory by any number of threads, and detection of changed files."""

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from rptrain.utils import phases
from rptrain.utils.errors import UserError
from rptrain.utils.liveness import progressed


class Stamp(NamedTuple):
    """The properties of a file that change with its content."""

    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> Self:
        """The stamp of a path or an open descriptor. Raises OSError if it does not exist."""
        found = os.stat(file)
        return cls(found.st_size, found.st_mtime_ns)


class OpenFile:
    """A file open for reading. Context manager. Raises UserError, with the file's name, if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error

    def forget(self, offset: int, nbytes: int) -> None:
        """Drops a range from the page cache, so that the next read comes from the disk, if the file system can."""
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def check(self, stamp: Stamp) -> None:
        """Raises UserError if the file has changed since it had this stamp."""
        if Stamp.of(self._descriptor) != stamp:
            raise UserError(f"{self._path} was changed while it was in use: restore it")

    def read(self, offset: int, buffer: memoryview, *, counted: bool = True) -> None:
        """Fills a byte buffer from the file, starting at `offset`. Raises UserError if the file ends before.

        `counted`: whether the bytes count in the phase (utils/phases.py); not so for those that are read again in it.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if count == 0:
                raise UserError(
                    f"{self._path} ends after {offset + done} bytes, before all of it was read: it was truncated "
                    "meanwhile; restore it"
                )
            done += count
            progressed()
            if counted:
                phases.read(count)

    def _unreadable(self, error: OSError) -> UserError:
        return UserError(f"cannot read {self._path}: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)
