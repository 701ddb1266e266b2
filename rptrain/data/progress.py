"""The progress of reading data files: rows, rows per second, and the time left."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import getsize
from pathlib import Path
from typing import Protocol, TypeVar

from rptrain.data.read import Position
from rptrain.utils.errors import UserError
from rptrain.utils.phases import Phase

PAUSE = 0.25  # seconds between two reports
FIRST = 1.0  # seconds of measurements before there is a rate
WINDOW = 10.0  # seconds over which the rate is measured, or more:
ROWS = 4096  # rows over which it is measured at least, because many are finished at once


class HasLine(Protocol):
    """A document, by the line of the file that it was made from."""

    @property
    def line(self) -> int: ...


class RowCounts(Protocol):
    """The counts of a file's rows."""

    @property
    def total(self) -> int: ...

    @property
    def bad(self) -> int: ...


T = TypeVar("T")
D = TypeVar("D", bound=HasLine)


@dataclass(frozen=True)
class ReadProgress:
    """How far the files of a data set have been read, rendered and tokenized."""

    file: str  # its name
    number: int  # of the file, from 1
    files: int
    rows: int  # of this file
    seconds: float  # spent on this file
    rate: float | None  # rows per second, lately
    share: float | None  # of the bytes of all files, at least; None if it is unknown
    left: float | None  # seconds until all files are read, as far as is known
    done: bool = False  # this file was read to its end

    def show(self, phase: Phase) -> None:
        """Show it as the progress of a phase, such as "reading a.jsonl: 24,000 rows, 2,500 rows/s, 40%, 14 s left"."""
        files = f" ({self.number:,} of {self.files:,})" if self.files > 1 else ""
        phase.name, phase.unit, phase.done = f"reading {self.file}{files}", "row", self.rows
        phase.rate, phase.share, phase.left = self.rate, self.share, self.left
        if self.done and self.seconds:
            phase.rate = self.rows / self.seconds


Report = Callable[[ReadProgress], object]  # called a few times per second, and at the end of each file


@dataclass(frozen=True)
class _Sample:
    """`rows` and `nbytes` of all files; `nbytes` is None if it is unknown."""

    time: float
    rows: int
    nbytes: float | None


class Watch:
    """Counts the rows of a data set's files while they are read, and reports them.

    A row costs a look at the clock, less than a thousandth of what its rendering and tokenizing take.
    """

    def __init__(self, files: Sequence[Path], report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._report, self._clock = files, report, clock
        self._sizes = [_size(file) for file in files]
        self._samples = deque[_Sample]()
        self._number = -1
        self._before = 0  # rows of the files before

    def begin(self, number: int, counts: RowCounts) -> None:
        """The file with this number, from 0, is read from now on. `counts` are counted while it is read."""
        if number != self._number + 1:  # those between were not read: their bytes took no time
            self._samples.clear()
        self._number, self._counts = number, counts
        self._documents, self._line = 0, 0
        self._position: Position | None = None
        self._began = self._due = self._clock()

    def examples(self, examples: Iterable[T]) -> Iterator[T]:
        """The examples of the file. They report progress, too, because rows that are refused give no documents."""
        for example in examples:
            self._look()
            yield example

    def documents(self, documents: Iterable[D]) -> Iterator[D]:
        """The documents of the file in the order of their lines, in which they are counted."""
        for document in documents:
            self._documents += 1
            self._line = document.line
            self._look()
            yield document
        self._report(self._reading(self._clock(), done=True))
        self._before += self._counts.total

    def _look(self) -> None:
        now = self._clock()
        if now >= self._due:
            self._due = now + PAUSE
            self._report(self._reading(now))

    def _reading(self, now: float, *, done: bool = False) -> ReadProgress:
        seconds = now - self._began
        rows = self._counts.total if done else self._documents + self._counts.bad
        share = 1.0 if done else self._share(seconds)
        before, size, all_sizes = sum(self._sizes[: self._number]), self._sizes[self._number], sum(self._sizes)
        nbytes = None if share is None else before + share * size
        if rows:  # the time until the first one is that of starting child processes
            self._add(_Sample(now, self._before + rows, nbytes))
        place = nbytes if nbytes is not None else before or None
        return ReadProgress(
            file=self._files[self._number].name,
            number=self._number + 1,
            files=len(self._files),
            rows=rows,
            seconds=seconds,
            rate=self._rate(now),
            share=None if place is None else min(1.0, place / max(all_sizes, 1)),
            left=self._left(now, all_sizes),
            done=done,
        )

    def _share(self, seconds: float) -> float | None:
        """The share of the file up to the last document. It is not looked for in a file that takes no time."""
        if self._documents <= 1:
            return 0.0
        if seconds < FIRST:
            return None
        try:
            self._position = self._position or Position(self._files[self._number])
            share = self._position.share(self._line)
        except (OSError, UserError):  # the reader of the file raises what a user must know
            return None
        return share if share is None or share < 1 else None  # the number of rows was estimated too low

    def _add(self, sample: _Sample) -> None:
        samples = self._samples
        if samples and samples[-1].rows == sample.rows and samples[-1].nbytes == sample.nbytes:
            return
        samples.append(sample)
        while len(samples) > 2 and sample.time - samples[1].time >= WINDOW and sample.rows - samples[1].rows >= ROWS:
            samples.popleft()

    def _rate(self, now: float) -> float | None:
        if not self._samples or now - self._samples[0].time < FIRST:
            return None
        first, last = self._samples[0], self._samples[-1]
        return (last.rows - first.rows) / (now - first.time)

    def _left(self, now: float, all_sizes: int) -> float | None:
        """The seconds that the bytes which are left take, at the pace of those before."""
        first = next((one for one in self._samples if one.nbytes is not None), None)
        last = next((one for one in reversed(self._samples) if one.nbytes is not None), None)
        if first is None or last is None or now - first.time < FIRST:
            return None
        begin, end = first.nbytes or 0, last.nbytes or 0
        return (all_sizes - end) * (now - first.time) / (end - begin) if begin < end < all_sizes else None


def _size(file: Path) -> int:
    """The bytes of a file; 0 if that is unknown: its reader raises why."""
    try:
        return getsize(file)
    except (OSError, ValueError):  # ValueError: an impossible name, for example with a null character
        return 0
