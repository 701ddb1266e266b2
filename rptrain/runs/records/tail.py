"""New complete lines of a file that another process appends to; a sample of the lines of a very large file."""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular
from rptrain.utils.paths import inside

LARGE = 32 << 20  # bytes that are read in full: more than 100,000 steps write
PIECE = 4096  # bytes of each sample from the middle of a larger file
BLOCK = 1 << 20  # bytes searched at a time
MARKED = 256 << 20  # bytes at the end that are searched for marks: about a million steps write them
BEHIND = 64 << 10  # bytes read from the last mark on
KEPT = 10_000  # lines with a text that are always read, the newest ones


class Tail:
    """Remembers the byte offset up to which it has read. An incomplete last line is read once it is complete. A file
    that was replaced is read from the start.

    If more than `large` bytes are new, about `large / 4` of them are read: half of these at the end, an eighth at the
    beginning, and pieces spread evenly over the middle. If one of `marks` occurs in the middle, what follows the last
    line with it is read too, if that line begins in the last MARKED bytes. Of the lines with one of the texts `kept` in
    these bytes, the newest KEPT are all read. With `end_only`, the last `large` bytes are read and nothing else.
    `skipped` counts the bytes that were not read.
    """

    def __init__(
        self,
        path: Path | str,
        large: int = LARGE,
        marks: Sequence[bytes] = (),
        kept: Sequence[bytes] = (),
        *,
        end_only: bool = False,
    ) -> None:
        self._path, self._large, self._marks, self._kept = Path(path), large, marks, kept
        self._end_only = end_only
        self._inode, self._offset, self._end = 0, 0, 0
        self.skipped = 0

    def read(self) -> list[bytes]:
        """The new lines, without their newlines. A file that is missing, cannot be read, or is a link
        that leads out of its folder has none.
        """
        try:
            file = open_regular(inside(self._path.parent, self._path.name))
        except (OSError, UserError):
            return []
        with file:
            inode, end = _identity(file)
            if inode != self._inode or end < self._offset:
                self._inode, self._offset, self._end = inode, 0, 0
            if end == self._end:  # do not read a long incomplete line again and again
                return []
            start, self._end = self._offset, end
            if end - start <= self._large:
                lines, self._offset = _whole_lines(file, start, end)
                return lines
            return self._read_thinned(file, start, end)

    def _read_thinned(self, file: BufferedReader, start: int, end: int) -> list[bytes]:
        if self._end_only:
            lines, self._offset = _whole_lines(file, _next_line(file, end - self._large, end), end)
            self.skipped += max(end - self._large - start, 0)
            return lines
        pieces = list(_pieces(start, end, self._large // 4))
        middle = pieces[0][1], pieces[-1][0]
        found_marks = (_last(file, mark, *middle) for mark in self._marks)
        pieces += [(marked, min(marked + BEHIND, end)) for marked in found_marks if marked is not None]
        if self._kept:
            pieces += _lines_with(file, re.compile(b"|".join(map(re.escape, self._kept))), *middle)
        lines, stop, seen = list[bytes](), start, 0
        for first, last in _joined(pieces):
            if first > start:  # may be in the middle of a line
                first = _next_line(file, first, last)
            found, stop = _whole_lines(file, first, last)
            lines += found
            seen += stop - first
        self._offset = stop
        self.skipped += stop - start - seen
        return lines


def end_of(path: Path, nbytes: int, start: int = 0) -> str:
    """The text at the end of a file: its last `nbytes` bytes, but none before `start`. Of a line that was redrawn after
    carriage returns, such as a progress bar, only the last state is kept. Empty if the file cannot be read.
    """
    try:
        with open_regular(inside(path.parent, path.name)) as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - nbytes))
            text = file.read().decode(errors="replace")
    except (OSError, UserError):
        return ""
    return "\n".join(line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))


def _identity(file: BufferedReader) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size


def _whole_lines(file: BufferedReader, start: int, end: int) -> tuple[list[bytes], int]:
    """The complete lines between `start` and `end`, and the offset at which the last of them ends."""
    file.seek(start)
    *lines, rest = file.read(end - start).split(b"\n")
    return lines, end - len(rest)


def _next_line(file: BufferedReader, first: int, last: int) -> int:
    """The offset of the first line that begins at `first` or later; `last` if none begins before that."""
    file.seek(first - 1)
    place = file.read(last - first + 1).find(b"\n")
    return last if place < 0 else first + place


def _last(file: BufferedReader, mark: bytes, start: int, end: int) -> int | None:
    """The offset of the last line with the mark between `start` and `end`, of which MARKED bytes are searched."""
    start = max(start, end - MARKED)
    while end > start:
        first = max(start, end - BLOCK)
        file.seek(first)
        place = file.read(end - first + len(mark) - 1).rfind(mark)  # the mark may extend into the next block
        if place >= 0:
            before = max(0, first + place - PIECE)
            file.seek(before)
            return before + file.read(first + place - before).rfind(b"\n") + 1
        end = first
    return None


def _lines_with(file: BufferedReader, text: re.Pattern[bytes], start: int, end: int) -> Iterable[tuple[int, int]]:
    """The ranges of the newest KEPT lines with a text, of MARKED bytes before `end`."""
    found = deque[tuple[int, int]](maxlen=KEPT)
    start = max(start, end - MARKED)
    while start < end:
        file.seek(start)
        block = file.read(BLOCK) + file.readline(BLOCK)
        first = last = 0
        for match in text.finditer(block):
            if match.start() >= last:
                first = block.rfind(b"\n", last, match.start()) + 1 or last
                last = block.find(b"\n", match.end()) + 1 or len(block)
                found.append((start + first, start + last))
        start += len(block)
    return found


def _pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of `size` bytes in all that represent the file from `start` to `end`."""
    head, tail = start + size // 8, end - size // 2
    count = (size - size // 8 - size // 2) // PIECE
    yield start, head
    for index in range(count):
        first = head + (tail - head - PIECE) * index // count
        yield first, first + PIECE
    yield tail, end


def _joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, with overlapping ones merged."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(pieces):
        if joined and first < joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined
