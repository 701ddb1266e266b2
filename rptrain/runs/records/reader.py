"""Reads new records of a run's files, of all processes that write them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rptrain.runs.records.events import VALIDATION_LOSS
from rptrain.runs.records.lanes import FILE, Snapshot
from rptrain.runs.records.process import other_folders
from rptrain.runs.records.tail import LARGE, Tail

RECENT = 480  # snapshots: two minutes
LANES = 2 << 20  # bytes at the end of lanes.jsonl that are read: more than RECENT snapshots of 8 GPUs
LANES_SHARE = 2  # `large` is that many times the bytes of lanes.jsonl that are read for a glance
BATCH = 500  # lines parsed at a time
LONGEST = 1 << 20  # bytes of a line: longer ones are skipped, no record in a view is that long
_UNREAD = b'"event":"slots"'  # in long records that a view does not use
_NUMBERS = b'"last":'  # in snapshots with the numbers of a step
_MARKS = (b'"run_started"',)  # in the first record of a process; the next ones describe it and its plan
_KEPT = tuple(
    f':"{text}"'.encode() for text in ("run_started", "resumed", "stopped", "finished", "failed", VALIDATION_LOSS)
)  # in records that are read of a file of any length; the search is fast since all begin with the same two characters


@dataclass(frozen=True)
class News:
    """New records of a process, parsed."""

    records: Sequence[Mapping[str, Any]] = ()
    snapshots: Sequence[Snapshot] = ()

    def __bool__(self) -> bool:
        return bool(self.records or self.snapshots)


class Reader:
    """Remembers how far it has read the files of each process. `large` is that of `Tail`. `brief`: of new snapshots,
    the newest one is enough, and the newest one with the numbers of a step.
    """

    def __init__(self, run: Path, large: int = LARGE, *, brief: bool = False) -> None:
        self._run, self._large, self._brief = run, large, brief
        self._files: dict[int, _Files] = {}

    @property
    def whole(self) -> bool:
        """Whether all events were read, instead of a sample of them."""
        return not any(files.skipped for files in self._files.values())

    def read(self) -> dict[int, News]:
        """New records by the rank of the process that wrote them, also of processes of an earlier start. Processes
        without any are left out.
        """
        found: dict[int, News] = {}
        for rank, folder in ((0, self._run), *other_folders(self._run).items()):
            if rank not in self._files:
                self._files[rank] = _Files(folder, self._large, brief=self._brief)
            if news := self._files[rank].read():
                found[rank] = news
        return found


class _Files:
    """The files of a process."""

    def __init__(self, folder: Path, large: int, *, brief: bool) -> None:
        self._brief = brief
        self._starts = 1  # in the first records; before another start, all snapshots of the process that ended count
        self._events = Tail(folder / "events.jsonl", large, _MARKS, _KEPT)
        self._lanes = Tail(folder / FILE, min(large // LANES_SHARE, LANES), end_only=True)

    @property
    def skipped(self) -> int:
        """Bytes of the events that were not read."""
        return self._events.skipped

    def read(self) -> News:
        lines, lanes = self._events.read(), self._lanes.read()
        starts = sum(_MARKS[0] in line[:64] for line in lines) if self._brief else 0
        lanes = _newest(lanes) if self._brief and starts <= self._starts else lanes[-RECENT:]
        self._starts = 0
        snapshots = map(Snapshot.from_line, lanes)
        return News(list(_records(lines)), [snapshot for snapshot in snapshots if snapshot is not None])


def _newest(lanes: Sequence[bytes]) -> Sequence[bytes]:
    """The last snapshot that has the numbers of a step, and the last one."""
    numbered, newest = [line for line in lanes if _NUMBERS in line][-1:], lanes[-1:]
    return newest if numbered == newest else [*numbered, *newest]


def _records(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among lines, without those that a view does not use. Parsing many lines at a time is faster."""
    wanted = [line for line in lines if _UNREAD not in line[:64] and len(line) <= LONGEST]
    for start in range(0, len(wanted), BATCH):
        batch = wanted[start : start + BATCH]
        try:
            records = json.loads(b"[" + b",".join(batch) + b"]")
        except (ValueError, RecursionError):
            records = [record for line in batch for record in _parsed(line)]
        yield from (record for record in records if isinstance(record, dict))


def _parsed(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        return []
