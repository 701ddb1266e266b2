"""What the process does and how far it is: phases that may take long. Work counts, and displays look.

    with phase("reading weights", nbytes) as reading:
        in_parallel(read, pieces, done=lambda piece: reading.add(len(piece)))

A phase costs a few microseconds, and a count one addition. Nothing is shown but by `rptrain.utils.phase_display`.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from rptrain.utils.text import counted, one_line, plural
from rptrain.utils.units import format_bytes, format_duration, format_speed

SHORT = 2.0  # seconds: a phase that takes no longer is not shown
REPEATED = 5.0  # seconds: the same for one that repeats
FIRST = 1.0  # seconds after which the time that is left is estimated
BYTES = "B"

_COUNT = r"\d[\d.,]* ?[A-Za-z]*(?: of \d[\d.,]* [A-Za-z]+)?(?:/s)?"  # of bytes, rows or a rate
_TIME = r"(?:\d+ [smhd] ?){1,2}(?:left)?"
_PART = rf"(?:\d{{1,3}}%|{_TIME}|\d[\d,]* of \d[\d,]* [a-z-]+|{_COUNT})"
_LINE = re.compile(rf"[a-z-]+ing\b.*: {_PART}(?:, {_PART})*")  # see `Phase.sentence`
_PERCENT = re.compile(r", (\d{1,3})%(?:, |$)|: (\d{1,3})%(?:, |$)")
_open: list["Phase"] = []  # those that last, outermost first
_counting = threading.Lock()


@dataclass(eq=False)
class Phase:
    """A phase: `done` of `total` (None: unknown) in `unit`: BYTES, a noun such as "row", or "" to show the share alone.

    `name` begins with a verb in -ing. `share`, `rate` (per second) and `left` (seconds) are shown as they are set; else
    the share follows from the counts, and what is left from the share. `update` is called before it is shown.
    """

    name: str
    total: int | None = None
    unit: str = BYTES
    done: int = 0
    share: float | None = None
    rate: float | None = None
    left: float | None = None
    reads: bool = False  # bytes that are read from files count
    repeats: bool = False  # one of many alike, such as steps: shown beside other numbers, and without a summary
    update: Callable[[], object] = lambda: None
    began: float = field(default_factory=lambda: monotonic())
    ended: float | None = None
    complete: bool = False  # it has ended without an error
    root: "Phase | None" = None  # the outermost phase that it is part of

    def add(self, count: int = 1) -> None:
        """Count this much more as done. Any thread may call this, once per piece of megabytes rather than per row."""
        with _counting:
            self.done += count

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return (monotonic() if self.ended is None else self.ended) - self.began

    @property
    def fraction(self) -> float | None:
        """The share that is done; None if it is unknown."""
        if self.share is not None or not self.total:
            return self.share
        return min(self.done / self.total, 1.0)

    def sentence(self) -> str:
        """Such as "reading weights: 3.20 GiB of 15.0 GiB, 21%, 14 s left". `is_sentence` recognizes it."""
        share, counts = self.fraction, self._counts()
        parts = [counts] if counts else []
        if share is not None:
            parts.append(f"{int(100 * share)}%")
        left = self.left
        if left is None and share and share < 1 and self.rate is None and self.seconds >= FIRST:
            left = self.seconds * (1 - share) / share
        if left is not None:
            parts.append(f"{format_duration(left)} left")
        return f"{one_line(self.name)}: {', '.join(parts or [format_duration(self.seconds)])}"

    def summary(self) -> str:
        """Such as "reading weights took 21 s (15.0 GiB)"."""
        counts = self._counts(whole=True)
        return f"{one_line(self.name)} took {format_duration(self.seconds)}" + (f" ({counts})" if counts else "")

    def _counts(self, *, whole: bool = False) -> str:
        if not self.unit or not (self.done or self.total or self.unit != BYTES):
            return ""
        if self.unit == BYTES:
            text = format_bytes(self.done)
            return text if whole or self.total is None else f"{text} of {format_bytes(self.total)}"
        text = counted(self.done, self.unit)
        if not whole and self.total is not None:
            text = f"{self.done:,} of {counted(self.total, self.unit)}"
        return text if self.rate is None else f"{text}, {format_speed(self.rate)} {plural(self.unit)}/s"


@contextmanager
def phase(name: str, total: int | None = None, unit: str = BYTES, *, reads: bool = False) -> Iterator[Phase]:
    """The process is in this phase as long as the context lasts."""
    with during(Phase(name, total, unit, reads=reads)) as entered:
        yield entered


@contextmanager
def during(entered: Phase) -> Iterator[Phase]:
    """The process is in this phase, which may have begun before, as long as the context lasts."""
    with _counting:  # another thread may end a phase
        outer = _open[0] if _open else entered
        entered.root = entered.root or outer
        _open.append(entered)
    try:
        yield entered
        entered.complete = True
    finally:
        with _counting:
            _open.remove(entered)
        entered.ended = monotonic()


def current() -> Phase | None:
    """The innermost phase that has lasted SHORT seconds, or REPEATED; None if there is none. Any thread may call it."""
    long = (one for one in reversed(tuple(_open)) if one.seconds >= (REPEATED if one.repeats else SHORT))
    found = next(long, None)
    if found is not None:
        found.update()
    return found


def read(nbytes: int) -> None:
    """Bytes of a file were read, by any thread: they count in the innermost phase, if it `reads`."""
    for innermost in tuple(_open)[-1:]:
        if innermost.reads:
            innermost.add(nbytes)


def is_sentence(line: str) -> bool:
    """Whether a line of a process's output is a `Phase.sentence`."""
    return _LINE.fullmatch(line) is not None


def share_in(sentence: str) -> float | None:
    """The share that a `Phase.sentence` names."""
    found = _PERCENT.search(sentence)
    return None if found is None else int(found[1] or found[2]) / 100
