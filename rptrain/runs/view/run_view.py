"""The state of a run for display: `RunView` reads what the trainer writes, and keeps what an interface shows.

    view = RunView(Path("runs/my"))  # reads all records; takes less than a second for 100,000 steps
    view.refresh()                   # reads new records; True if there are any
    view.state, view.step, view.total_steps, view.eta
    view.steps.points("loss", 200)   # for a plot; see series.COLUMNS for the names
    view.lanes                       # the current activity of each device, and its rates over the last seconds
    view.processes                   # the same of the other processes, if several train the run

A view belongs to one thread. `refresh` takes milliseconds and may be called a few times per second. If that is too
slow, another thread may read (`news`) and the owner add the result (`add`). Open a large run in a worker thread.
Missing files, incomplete last lines and records of unknown kinds are skipped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rptrain.runs.records.process import FOLDER
from rptrain.runs.records.reader import News, Reader
from rptrain.runs.records.tail import LARGE
from rptrain.runs.view.process_view import WINDOW, ProcessView
from rptrain.runs.view.values import LogLine

SPREAD = 30.0  # seconds by which the starts of a run's processes, and the clocks of their machines, may differ


class RunView(ProcessView):
    """The state of the run in `path`; the module's docstring shows its use. `large` is that of `Tail`. With `empty`,
    it shows only what `take` and `take_snapshot` add. With `brief`, it has only the newest snapshots, as for a list.

    If several processes train the run, the view is that of the first, except where something else is said, and has a
    view for each of the others.
    """

    def __init__(self, path: Path | str, *, large: int = LARGE, empty: bool = False, brief: bool = False) -> None:
        super().__init__(Path(path))
        self._reader = Reader(self.path, large, brief=brief)
        self._others: dict[int, ProcessView] = {}  # by rank; some may be of an earlier start
        if not empty:
            self.refresh()

    # ---- reading

    def refresh(self) -> bool:
        """Reads new records and adds them. Returns whether there were any."""
        return self.add(self.news())

    @property
    def whole(self) -> bool:
        """Whether it has all events, instead of a sample of them."""
        return self._reader.whole

    def news(self) -> Mapping[int, News]:
        """Reads new records without changing what the view shows. Another thread may call this, one at a time."""
        return self._reader.read()

    def add(self, news: Mapping[int, News]) -> bool:
        """Adds new records to the view. Returns whether there were any."""
        for rank, found in news.items():
            self.of_process(rank).take_news(found)
        return bool(news)

    # ---- several processes

    def of_process(self, rank: int) -> ProcessView:
        """The view of a process, whether or not it trains the run now."""
        if rank == self.rank:
            return self
        if rank not in self._others:
            self._others[rank] = ProcessView(self.path / FOLDER / str(rank), rank)
        return self._others[rank]

    @property
    def processes(self) -> tuple[ProcessView, ...]:
        """The views of the other processes that train the run, by rank. A process is left out until it has records
        since the run's newest start.
        """
        since = (self.taken_up or 0.0) - SPREAD
        others = (self._others[rank] for rank in sorted(self._others) if rank < self.process_count)
        return tuple(view for view in others if view.taken_up is not None and view.taken_up >= since)

    @property
    def bubble(self) -> float | None:
        """The average share of the last seconds in which the devices of all processes did not compute; None if
        unknown, and for as long after the end of the first step since the start or a pause.
        """
        now = self.now
        if now is None or self.is_paused or not self.progress.first_step_ended(now.time - WINDOW):
            return None
        lanes = [lane for view in (self, *self.processes) for lane in view.lanes]
        return 1 - sum(lane.busy_share for lane in lanes) / len(lanes) if lanes else None

    @property
    def failure(self) -> str | None:
        """The error message of a failed run. Of several processes, the first that failed counts, and the message begins
        with its name unless it is the run's first process.
        """
        failed = [(view.failed[0], view) for view in (self, *self.processes) if view.failed is not None]
        if not failed:
            return None
        _, view = min(failed, key=lambda one: one[0])
        return view.own_failure if view is self else f"{view.name}: {view.own_failure}"

    @property
    def whole_log(self) -> Sequence[LogLine]:
        """The log with the warnings and errors of the other processes, each with the name of its process. What several
        processes say is there once.
        """
        if not (others := self.processes):
            return self.log
        lines, said = list(self.log), {line.text for line in self.log}
        for view in others:
            for line in view.log:
                if line.kind != "info" and line.time >= (view.taken_up or 0.0) and line.text not in said:
                    said.add(line.text)
                    lines.append(replace(line, text=f"{view.name}: {line.text}"))
        return sorted(lines, key=lambda line: line.time)
