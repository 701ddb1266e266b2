"""Speed and use of devices and memory over the time of a run: from a record per minute, and in the last two minutes
from the newest snapshots.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from math import inf, isfinite, nan

from rptrain.runs.records.events import Progress
from rptrain.runs.records.lanes import Snapshot

COLUMNS = ("tokens_per_second", "busy", "vram", "host", "power")
MINUTE = 60.0  # seconds that a record covers, at least
BUCKET = 5.0  # seconds of snapshots that become a point


class Usage:
    """Rows in the order of time. `busy` is the average share of time in which the devices computed, `vram` the bytes in
    use on the fullest GPU, `host` the bytes of the process, `power` the watts of all GPUs. NaN: not known.
    """

    def __init__(self) -> None:
        self._times = array("d")
        self._columns = {name: array("d") for name in COLUMNS}

    def append(self, progress: Progress) -> None:
        """Adds a row; two rows after a gap, for the beginning and the end of what it covers. An earlier time than the
        last one's, by a clock that was set back, is skipped.
        """
        last = self._times[-1] if self._times else -inf
        for time in (progress.time - progress.seconds, progress.time):
            if time > last + (MINUTE if time < progress.time else 0.0):
                self._times.append(time)
                for column, value in zip(self._columns.values(), _row(progress), strict=True):
                    column.append(value)

    def keep(self, recent: Sequence[Snapshot]) -> None:
        """Adds rows for the last snapshots of a process that has ended."""
        last = self._times[-1] if self._times else -inf
        for shots in _buckets([shot for shot in _without_gap(recent) if shot.time > last]):
            self.append(progress_of(shots, 0))

    def curve(self, name: str, recent: Sequence[Snapshot]) -> tuple[list[float], list[float]]:
        """Unix times and values of a column, to the end of the newest snapshots. Of a sample of a long run's snapshots,
        those at the end count.
        """
        count, recent = len(self._times), _without_gap(recent)
        if recent and count and recent[-1].time >= self._times[-1]:
            count = bisect_left(self._times, recent[0].time + MINUTE)
        xs, ys = list(self._times[:count]), list(self._columns[name][:count])
        last = xs[-1] if xs else 0.0
        for shots in _buckets([shot for shot in recent if shot.time > last]):
            progress = progress_of(shots, 0)
            xs.append(progress.time)
            ys.append(_row(progress)[COLUMNS.index(name)])
        return xs, ys


def warming_up(starts: Sequence[float], times: Sequence[float], values: Sequence[float]) -> set[int]:
    """The indices of the points in the first minute of values of each process. Its first steps are slow: kernels are
    compiled, and files are read. `starts`: Unix times at which the processes began.
    """
    first: dict[int, float] = {}  # the time of its first value, by process
    indices = set[int]()
    for index, (time, value) in enumerate(zip(times, values, strict=True)):
        if isfinite(value) and time - first.setdefault(bisect_right(starts, time), time) < MINUTE:
            indices.add(index)
    return indices


def _without_gap(recent: Sequence[Snapshot]) -> list[Snapshot]:
    """The newest snapshots that follow each other within BUCKET seconds."""
    shots = list(recent)
    start = len(shots) - 1
    while start > 0 and shots[start].time - shots[start - 1].time <= BUCKET:
        start -= 1
    return shots[max(start, 0) :]


def progress_of(shots: Sequence[Snapshot], step: int) -> Progress:
    """The record of one or more successive snapshots, after `step` steps."""
    newest = next((shot for shot in reversed(shots) if shot.lanes), None)
    count = 0 if newest is None else len(newest.lanes)
    lanes = [shot for shot in shots if count and len(shot.lanes) == count]
    seconds = max(sum(shot.seconds for shot in lanes), 1e-3)
    busy = [sum(sum(shot.lanes[n].busy.values()) for shot in lanes) / seconds for n in range(count)]
    memory = [max((shot.lanes[n].memory or 0 for shot in lanes), default=0) for n in range(count)]
    power = [sum(shot.lanes[n].power or 0.0 for shot in lanes) / len(lanes) for n in range(count)]
    steps = [shot.last for shot in shots if shot.last is not None]
    timed = [(one.tokens_per_second, one.seconds) for one in steps if one.tokens_per_second and one.seconds]
    spent = sum(took for _, took in timed)
    last = shots[-1]
    return Progress(
        step=step,
        phase=last.phase,
        seconds=round(sum(shot.seconds for shot in shots), 3),
        tokens_per_second=round(sum(speed * took for speed, took in timed) / spent, 3) if spent else None,
        process=last.process,
        free=last.free,
        busy=tuple(round(min(share, 1.0), 4) for share in busy),
        memory=tuple(memory) if all(memory) else (),
        power=tuple(round(watts, 1) for watts in power) if all(power) else (),
        time=last.time,
    )


def _row(progress: Progress) -> tuple[float, ...]:
    """The values of COLUMNS."""
    busy, power = progress.busy, progress.power
    return (
        nan if progress.tokens_per_second is None else progress.tokens_per_second,
        sum(busy) / len(busy) if busy else nan,
        max(progress.memory, default=nan),
        progress.process,
        sum(power) if power else nan,
    )


def _buckets(shots: Sequence[Snapshot]) -> Iterator[Sequence[Snapshot]]:
    """Successive snapshots in groups of BUCKET seconds; an incomplete one is left out unless it is the only one."""
    start = 0
    for index, shot in enumerate(shots):
        if shot.time - shots[start].time >= BUCKET:
            yield shots[start:index]
            start = index
    if start == 0 and shots:
        yield shots
