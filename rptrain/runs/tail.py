"""Whole lines of a file that another process appends to, each once; of a very large file a part of them."""

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

LARGE = 32 << 20  # bytes that are read as they are, more than 100,000 steps write
PIECE = 4096  # bytes that are looked at here and there in the midst of what is larger


class Tail:
    """Reads on by byte offset. A last line without its end waits for it; a file that was replaced is begun anew.

    Where more than `large` bytes are new, a quarter of that is read: the half of it at the end, an eighth at the
    beginning, and pieces spread evenly over what lies between. `skipped` counts the bytes that were passed over.
    """

    def __init__(self, path: Path | str, large: int = LARGE) -> None:
        self._path, self._large = Path(path), large
        self._inode, self._offset = 0, 0
        self.skipped = 0

    def read(self) -> list[bytes]:
        """The lines that are new, without their ends. A file that is not there has none."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            return []
        with file:
            inode, end = _identity(file)
            if inode != self._inode or end < self._offset:
                self._inode, self._offset = inode, 0
            if end == self._offset:
                return []
            if end - self._offset <= self._large:
                lines, self._offset = _whole_lines(file, self._offset, end)
                return lines
            return self._read_thinned(file, end)

    def _read_thinned(self, file: BufferedReader, end: int) -> list[bytes]:
        start, lines, stop, seen = self._offset, list[bytes](), self._offset, 0
        for first, last in _pieces(start, end, self._large // 4):
            if first > start:  # in the midst of a line
                file.seek(first - 1)
                first = first - 1 + len(file.readline())
            found, stop = _whole_lines(file, first, last)
            lines += found
            seen += max(stop - first, 0)
        self._offset = stop
        self.skipped += stop - start - seen
        return lines


def _identity(file: BufferedReader) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size


def _whole_lines(file: BufferedReader, start: int, end: int) -> tuple[list[bytes], int]:
    """Those that begin at `start` and end before `end`, and where the last of them ends."""
    file.seek(start)
    *lines, rest = file.read(max(end - start, 0)).split(b"\n")
    return lines, max(end, start) - len(rest)


def _pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that `size` bytes of stand for the whole."""
    head, tail = start + size // 8, end - size // 2
    count = (size - size // 8 - size // 2) // PIECE
    yield start, head
    for index in range(count):
        first = head + (tail - head - PIECE) * index // count
        yield first, first + PIECE
    yield tail, end
