"""A run from its beginning again, from what it recorded, at a speed of one's own. Time without a process is skipped.

`news` may be called by a thread of its own; the view changes by `add` alone.
"""

import json
from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from typing import Any, Self

from rptrain.runs.records.fields import time_of
from rptrain.runs.records.lanes import FILE, OLD_FILE, Snapshot
from rptrain.runs.records.process import other_folders
from rptrain.runs.records.reader import LONGEST
from rptrain.runs.view.run_view import RunView
from rptrain.runs.view.values import LogLine
from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular
from rptrain.utils.paths import inside
from rptrain.utils.units import format_duration

SHOWN_IN = 30.0  # seconds that a replay of the training takes at its first speed, or less
SLOWEST, FASTEST = 1, 1 << 16
GAP = 3.0  # seconds on the screen without records before a process starts, from which they are skipped
Record = tuple[float, int, Any]  # time, rank of the process, and a snapshot, the JSON object of an event or a LogLine
MAX_RECORDS = 5000  # records that are taken at once
SKIMMED = 1 << 16  # bytes of events, of more a part: enough to know when the last was


class Replay:
    """`view` is the run as it was at a moment; `add(news(seconds))` moves it on."""

    def __init__(self, run: Path) -> None:
        self.view = RunView(run, empty=True)
        folders = {0: run, **other_folders(run)}
        self._records = merge(*(_records(*found) for found in folders.items()), key=lambda record: record[0])
        self._next = next(self._records, None)
        self._clock = self.began = self._next[0] if self._next else 0.0
        ended = RunView(run, large=SKIMMED)
        self.end = ended.last_event or self._clock
        self.speed = SLOWEST
        while self.speed * SHOWN_IN < ended.trained and self.speed < FASTEST:
            self.speed *= 2

    @property
    def done(self) -> bool:
        return self._next is None

    @property
    def left(self) -> float:
        """Seconds until its end, at this speed."""
        return max(0.0, self.end - self._clock) / self.speed

    @classmethod
    def at(cls, run: Path, clock: float, speed: int) -> Self:
        """A replay at a Unix time, which is moved to the beginning or the end of the run if it is outside."""
        replay = cls(run)
        replay.speed = speed
        replay._clock = min(max(clock, replay.began), replay.end)
        while found := replay.news(0.0):
            replay.add(found)
        return replay

    @property
    def clock(self) -> float:
        """The Unix time that is shown."""
        return self._clock

    def faster(self, by: float) -> None:
        self.speed = int(min(max(self.speed * by, SLOWEST), FASTEST))

    def news(self, seconds: float) -> list[Record]:
        """Reads what was recorded in so many seconds, times the speed."""
        self._clock += seconds * self.speed
        found: list[Record] = list(self._skipped()) if seconds else []
        while self._next is not None and self._next[0] <= self._clock and len(found) < MAX_RECORDS:
            found.append(self._next)
            self._next = next(self._records, None)
        return found

    def _skipped(self) -> Iterator[Record]:
        """Moves the clock to the start of the next process if it is far away, with a line for the log."""
        if self._next is None or not isinstance(record := self._next[2], dict):
            return
        gap = self._next[0] - self._clock
        if record.get("event") == "run_started" and gap > GAP * self.speed:
            self._clock = self._next[0]
            yield self._clock, 0, LogLine(self._clock, f"replay: {format_duration(gap)} without records skipped")

    def add(self, news: list[Record]) -> None:
        """Shows it in the view."""
        for _, rank, record in news:
            view = self.view.of_process(rank)
            if isinstance(record, Snapshot):
                view.take_snapshot(record)
            elif isinstance(record, LogLine):
                view.log.append(record)
            else:
                view.take(record)


def _records(rank: int, folder: Path) -> Iterator[Record]:
    """What a process recorded, in order."""
    files = _events(folder / "events.jsonl"), _snapshots(folder / OLD_FILE, folder / FILE)
    return ((time, rank, record) for time, record in merge(*files, key=lambda pair: pair[0]))


def _events(path: Path) -> Iterator[tuple[float, Any]]:
    for line in _lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and (time := time_of(record)) is not None:
            yield time, record


def _snapshots(*paths: Path) -> Iterator[tuple[float, Any]]:
    for path in paths:
        for line in _lines(path):
            if (snapshot := Snapshot.from_line(line)) is not None:
                yield snapshot.time, snapshot


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(inside(path.parent, path.name)) as file:
            yield from (line for line in file if len(line) <= LONGEST)
    except (OSError, UserError):  # not recorded, or not readable
        return
