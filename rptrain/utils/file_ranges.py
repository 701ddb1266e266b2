"""Byte ranges of a file, read straight into memory by any number of threads; whether it is still the same file."""

import os
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from rptrain.utils.errors import UserError


class Stamp(NamedTuple):
    """What changes where a file does."""

    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> Self:
        """Of a path or an open descriptor. OSError where there is none."""
        found = os.stat(file)
        return cls(found.st_size, found.st_mtime_ns)


class OpenFile:
    """A file to read from; a context manager. UserError that names it where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error

    def forget(self, offset: int, nbytes: int) -> None:
        """Lets the system's page cache drop a range, so that the next read of it comes from the disk."""
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def check(self, stamp: Stamp) -> None:
        """UserError where the file is not what it was when it had this stamp."""
        if Stamp.of(self._descriptor) != stamp:
            raise UserError(f"{self._path} was changed while it was in use: restore it")

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fills the buffer, of bytes, with what begins `offset` bytes into the file. UserError where it ends before."""
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

    def _unreadable(self, error: OSError) -> UserError:
        return UserError(f"cannot read {self._path}: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)
