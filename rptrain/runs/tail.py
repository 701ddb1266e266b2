"""Whole lines of a file that another process appends to, each once; of a very large file a part of them."""

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

LARGE = 32 << 20  # bytes that are read as they are, more than 100,000 steps write
PIECE = 4096  # bytes that are looked at here and there in the midst of what is larger
BLOCK = 1 << 20  # bytes that are searched at once
BEHIND = 64 << 10  # bytes that are read from the last mark on


class Tail:
    """Reads on by byte offset. A last line without its end waits for it; a file that was replaced is begun anew.

    Where more than `large` bytes are new, a quarter of that is read: the half of it at the end, an eighth at the
    beginning, and pieces spread evenly over what lies between; and what follows the last line there that holds `mark`.
    `skipped` counts the bytes that were passed over.
    """

    def __init__(self, path: Path | str, large: int = LARGE, mark: bytes = b"") -> None:
        self._path, self._large, self._mark = Path(path), large, mark
        self._inode, self._offset, self._end = 0, 0, 0
        self.skipped = 0

    def read(self) -> list[bytes]:
        """The lines that are new, without their ends. A file that is not there, or cannot be read, has none."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115 (closed below)
        except OSError:
            return []
        with file:
            inode, end = _identity(file)
            if inode != self._inode or end < self._offset:
                self._inode, self._offset, self._end = inode, 0, 0
            if end == self._end:  # a last line without its end may be long
                return []
            start, self._end = self._offset, end
            if end - start <= self._large:
                lines, self._offset = _whole_lines(file, start, end)
                return lines
            return self._read_thinned(file, start, end)

    def _read_thinned(self, file: BufferedReader, start: int, end: int) -> list[bytes]:
        pieces = list(_pieces(start, end, self._large // 4))
        if self._mark and (marked := _last(file, self._mark, pieces[0][1], pieces[-1][0])) is not None:
            pieces.append((marked, min(marked + BEHIND, end)))
        lines, stop, seen = list[bytes](), start, 0
        for first, last in _joined(pieces):
            if first > start:  # maybe in the midst of a line
                first = _next_line(file, first, last)
            found, stop = _whole_lines(file, first, last)
            lines += found
            seen += stop - first
        self._offset = stop
        self.skipped += stop - start - seen
        return lines


def end_of(path: Path, nbytes: int, start: int = 0) -> str:
    """The text at the end of a file, at most so much, from `start` on; progress that was drawn over itself shows its
    last state. Empty where it cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - nbytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))


def _identity(file: BufferedReader) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size


def _whole_lines(file: BufferedReader, start: int, end: int) -> tuple[list[bytes], int]:
    """Those that begin at `start` and end before `end`, and where the last of them ends."""
    file.seek(start)
    *lines, rest = file.read(end - start).split(b"\n")
    return lines, end - len(rest)


def _next_line(file: BufferedReader, first: int, last: int) -> int:
    """Where the first line begins that begins at `first` or later; `last` where none does before that."""
    file.seek(first - 1)
    place = file.read(last - first + 1).find(b"\n")
    return last if place < 0 else first + place


def _last(file: BufferedReader, mark: bytes, start: int, end: int) -> int | None:
    """Where the last line begins whose mark lies between `start` and `end`."""
    while end > start:
        first = max(start, end - BLOCK)
        file.seek(first)
        place = file.read(end - first + len(mark) - 1).rfind(mark)  # it may reach into the block behind
        if place >= 0:
            before = max(0, first + place - PIECE)
            file.seek(before)
            return before + file.read(first + place - before).rfind(b"\n") + 1
        end = first
    return None


def _pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that `size` bytes of stand for the whole."""
    head, tail = start + size // 8, end - size // 2
    count = (size - size // 8 - size // 2) // PIECE
    yield start, head
    for index in range(count):
        first = head + (tail - head - PIECE) * index // count
        yield first, first + PIECE
    yield tail, end


def _joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, and those that overlap as one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(pieces):
        if joined and first < joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined
