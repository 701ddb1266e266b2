"""A run from its beginning again, from what it recorded, at a speed of one's own.

`news` may be called by a thread of its own; the view changes by `add` alone.
"""

import json
from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from typing import Any, Self

from rptrain.runs.lanes import FILE, OLD_FILE, Snapshot
from rptrain.runs.process import other_folders
from rptrain.runs.reader import LONGEST
from rptrain.runs.records import time_of
from rptrain.runs.view import RunView
from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular
from rptrain.utils.paths import inside

SHOWN_IN = 30.0  # seconds that a replay takes at its first speed, or more
SLOWEST, FASTEST = 1, 1 << 16
Record = tuple[float, int, Any]  # time, rank of the process, and a snapshot or the JSON object of an event
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
        self.end = RunView(run, large=SKIMMED).last_event or self._clock
        self.speed = SLOWEST
        while self.speed * SHOWN_IN < self.end - self._clock and self.speed < FASTEST:
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
        found: list[Record] = []
        while self._next is not None and self._next[0] <= self._clock and len(found) < MAX_RECORDS:
            found.append(self._next)
            self._next = next(self._records, None)
        return found

    def add(self, news: list[Record]) -> None:
        """Shows it in the view."""
        for _, rank, record in news:
            view = self.view.of_process(rank)
            if isinstance(record, Snapshot):
                view.take_snapshot(record)
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
