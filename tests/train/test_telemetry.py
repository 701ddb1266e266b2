"""What a trainer writes of its devices while it trains: whole, bounded, and of no harm to the run."""

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from rptrain.engine.recorder import Activity, LaneState, Pass
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.events import Progress
from rptrain.runs.records.lanes import FILE, OLD_FILE, LaneRecord, Snapshot, StepNumbers, Work
from rptrain.runs.records.reader import RECENT
from rptrain.runs.records.timeline import SlotSpan, StepTimeline
from rptrain.runs.view.run_view import RunView
from rptrain.schedule.plan import Computation, Plan
from rptrain.train import telemetry, trainer, validation
from rptrain.train.save import Saver
from rptrain.train.telemetry import Telemetry
from rptrain.utils import phases

from .. import run_tools as tools

SLOT = Plan.parse("F0-3 FB4-5 B2-3 B0-1 | N=2 M=4 MR=4").slots(0)[0]


class FakeEngine:
    """Says something else each time it is asked; the last for ever."""

    def __init__(self, *activities: Activity) -> None:
        self._activities = list(activities)

    def activity(self) -> Activity:
        return self._activities.pop(0) if len(self._activities) > 1 else self._activities[0]

    def computations(self) -> tuple[list[Computation], ...]:
        return ([Computation(0, 0, 5.0, 6.0), Computation(1, 0, 6.0, 8.0)],)


def check() -> None:
    """The folder is in its place."""


def activity(seconds: float, up: int, current: Pass | None, waiting: str | None = None) -> Activity:
    lane = LaneState(current, current is not None, waiting, {"F": seconds, "FB": 0.0, "B": 0.0}, up, 0)
    return Activity((lane,), "waiting", 0.5, 1)


def snapshots(folder: Path, name: str = FILE) -> list[Snapshot]:
    return parsed((folder / name).read_bytes())


def written(folder: Path) -> list[Snapshot]:
    """The complete lines so far, while the thread writes: a reader may see a part of the newest one."""
    content = (folder / FILE).read_bytes()
    return parsed(content[: content.rfind(b"\n") + 1])


def parsed(content: bytes) -> list[Snapshot]:
    found = [Snapshot.from_line(line) for line in content.splitlines()]
    assert None not in found
    return [shot for shot in found if shot is not None]


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL", 0.005)
    monkeypatch.setattr(telemetry, "MINUTE", math.inf)


def test_what_was_done_since_the_last_record(tmp_path, quick):
    began = time.time()
    engine = FakeEngine(
        activity(1.0, 100, Pass(4, SLOT, 2)), activity(1.5, 150, None), activity(1.5, 150, None, "inputs")
    )
    with Telemetry(tmp_path, ("cpu:0",), print, check) as kept:
        with kept.watching(engine, 10):  # type: ignore[arg-type]
            tools.wait_for(lambda: len([shot for shot in written(tmp_path) if shot.lanes]) > 3)
        with kept.doing("saving"):
            tools.wait_for(lambda: written(tmp_path)[-1].phase == "saving")
    first, second, third, *_ = (shot for shot in snapshots(tmp_path) if shot.lanes)
    assert first.lanes == (LaneRecord("cpu:0", "computing", "F0-3", "F", 0, 2, 15, None, {"F": 1.0}, 100),)
    assert second.lanes == (LaneRecord("cpu:0", "idle", busy={"F": 0.5}, up=50),)
    assert third.lanes == (LaneRecord("cpu:0", "waiting", waiting="inputs"),)
    assert first.phase == "training" and first.optimizer is not None and first.optimizer.queue == 1
    assert first.process > 1 << 20 and first.free > 0 and began <= first.time <= time.time()
    assert snapshots(tmp_path)[-1].lanes == ()


def test_the_numbers_of_each_step_are_recorded_once(tmp_path, quick):
    with Telemetry(tmp_path, (), print, check) as kept:
        for step in (1, 2):
            kept.last = StepNumbers.of(step, math.nan, 1e-3, math.inf, 200.0, 0.5)
            tools.wait_for(lambda step=step: [shot.last.step for shot in written(tmp_path) if shot.last][-1:] == [step])
            before = len(written(tmp_path))
            tools.wait_for(lambda before=before: len(written(tmp_path)) > before)
    found = [shot.last for shot in snapshots(tmp_path) if shot.last is not None]
    assert found == [StepNumbers(step, None, 1e-3, None, 200.0, 0.5) for step in (1, 2)]


def test_a_long_phase_is_recorded_while_it_lasts(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(phases, "SHORT", 0.0)
    monkeypatch.setattr(phases, "FIRST", 1000.0)
    with Telemetry(tmp_path, (), print, check):
        with phases.phase("reading weights", 100) as reading:
            reading.add(25)
            wanted = Work("reading weights: 25 B of 100 B, 25%", 0.25)
            tools.wait_for(lambda: any(shot.work == wanted for shot in written(tmp_path)))
        before = len(written(tmp_path))
        tools.wait_for(lambda: len(written(tmp_path)) > before + 2)
    works = [shot.work for shot in snapshots(tmp_path)]
    assert works[-1] is None and Work("reading weights: 25 B of 100 B, 25%", 0.25) in works


def test_the_timeline_of_a_step(tmp_path, quick, monkeypatch):
    """It is recorded again and again, later phases included, until there is another one or another engine."""
    monkeypatch.setattr(telemetry, "TIMELINE", 0.02)
    engine = FakeEngine(activity(1.0, 1, None))

    def timelines() -> list[int | None]:
        return [None if shot.timeline is None else shot.timeline.step for shot in written(tmp_path)]

    with Telemetry(tmp_path, ("cpu:0",), print, check) as kept:
        with kept.watching(engine, 10):  # type: ignore[arg-type]
            kept.last = StepNumbers.of(12, 2.0, 1e-3, 1.0, 100, None)  # a save has interrupted it
            before = len(written(tmp_path))
            tools.wait_for(lambda: len(written(tmp_path)) > before + 9)
            assert set(timelines()) == {None}
            kept.last = StepNumbers.of(12, 2.0, 1e-3, 1.0, 100, 2.0)
            tools.wait_for(lambda: timelines().count(12) > 1)
        with kept.doing("exporting"):
            begun = timelines().count(12)
            tools.wait_for(lambda: timelines().count(12) > begun + 2)
        with kept.watching(engine, 12):  # type: ignore[arg-type]
            tools.wait_for(lambda: written(tmp_path)[-1].lanes)
            before = len(written(tmp_path))
            tools.wait_for(lambda: len(written(tmp_path)) > before + 9)
    (found,) = {shot.timeline for shot in snapshots(tmp_path) if shot.timeline is not None}
    assert found == StepTimeline(1, 2.0, (1.0,), ((SlotSpan(0, 0.0, 2.0),),), 12)
    assert set(timelines()[before:]) == {None}


def test_every_minute_is_summed_up(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(telemetry, "MINUTE", 0.05)
    told: list[Any] = []
    with Telemetry(tmp_path, (), told.append, check, done=6) as kept:
        tools.wait_for(lambda: told)
        assert told[0].step == 6
        kept.last = StepNumbers.of(7, 2.0, 1e-3, 1.0, 200.0, 0.5)
        tools.wait_for(lambda: any(event.tokens_per_second for event in told) and len(told) > 2)
        before = len(told)
        tools.wait_for(lambda: len(told) > before + 1)
    assert all(isinstance(event, Progress) and event.seconds >= 0.05 for event in told)
    assert told[-1].step == 7 and {event.tokens_per_second for event in told} == {200.0, None}
    times = [shot.time for shot in snapshots(tmp_path)]
    assert [event.time for event in told] == [time for time in times if time in {event.time for event in told}]


def test_a_record_has_the_phase_of_its_lanes(tmp_path, quick, monkeypatch):
    """Also if the phase changes between the two readings."""
    asked, reached, opened = [], threading.Event(), threading.Event()

    class Noted(FakeEngine):
        def activity(self) -> Activity:
            asked.append(True)
            return super().activity()

    def held() -> int:
        if asked:
            reached.set()
            assert opened.wait(tools.PATIENCE)
        return 1 << 40

    monkeypatch.setattr(telemetry, "available_bytes", held)
    with Telemetry(tmp_path, ("cpu:0",), print, check) as kept:
        with kept.watching(Noted(activity(1.0, 1, None)), 0):  # type: ignore[arg-type]
            assert reached.wait(tools.PATIENCE)
        with kept.doing("saving"):
            opened.set()
            tools.wait_for(lambda: [shot.phase for shot in written(tmp_path)][-1:] == ["saving"])
    assert [shot.phase for shot in snapshots(tmp_path) if shot.lanes] == ["training"]


def test_the_files_stay_small(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(telemetry, "MAX_BYTES", 1000)
    with Telemetry(tmp_path, (), print, check):
        tools.wait_for(lambda: (tmp_path / OLD_FILE).exists())
        first = snapshots(tmp_path, OLD_FILE)[0]
        tools.wait_for(lambda: snapshots(tmp_path, OLD_FILE)[0] != first)
    assert {file.name for file in tmp_path.iterdir()} == {FILE, OLD_FILE}
    assert all(file.stat().st_size < 1500 for file in tmp_path.iterdir())
    assert snapshots(tmp_path, OLD_FILE)[-1].time < snapshots(tmp_path)[0].time


def test_a_folder_that_cannot_be_written_keeps_the_newest_records(tmp_path, quick, monkeypatch):
    oldest: set[float] = set()

    def count_oldest() -> int:
        """The number of records that were the oldest one so far. The file is empty for a moment in between."""
        oldest.update(shot.time for shot in written(tmp_path)[:1])
        return len(oldest)

    monkeypatch.setattr(telemetry, "MAX_BYTES", 1000)
    (tmp_path / OLD_FILE).mkdir()  # in the way of the rename
    with Telemetry(tmp_path, (), print, check):
        tools.wait_for(lambda: count_oldest() > 1)
    assert (tmp_path / FILE).stat().st_size < 1500


def test_a_disk_that_is_full_costs_records_only(tmp_path, quick, monkeypatch):
    append, lost = telemetry.LineFile.append, []

    def noted(file: telemetry.LineFile, line: bytes) -> None:
        try:
            append(file, line)
        except OSError:
            lost.append(line)
            raise

    monkeypatch.setattr(telemetry.LineFile, "append", noted)
    with Telemetry(tmp_path, (), print, check):
        tools.wait_for(lambda: len(written(tmp_path)) > 1)
        torn = False
        while not torn:  # a line that came between the size and the limit leaves none
            before = len(lost)
            with tools.room_for((tmp_path / FILE).stat().st_size + 20):
                tools.wait_for(lambda before=before: len(lost) > before + 2)
                content = (tmp_path / FILE).read_bytes()
            torn, before = not content.endswith(b"\n"), content.count(b"\n")
        tools.wait_for(lambda: (tmp_path / FILE).read_bytes().count(b"\n") > before + 2)
    first, second = snapshots(tmp_path)[before - 1 : before + 1]
    times = [shot.time for shot in map(Snapshot.from_line, lost) if shot is not None]
    assert len(times) == len(lost) and len([at for at in times if first.time < at < second.time]) > 2


def test_a_new_file_is_begun_once_there_is_room_for_it(tmp_path, quick, monkeypatch):
    """The full one was renamed, and is written to until then."""
    made, lines = [], telemetry.LineFile

    def cramped(path: Path) -> telemetry.LineFile:
        made.append(path)
        if 1 < len(made) < 4:
            raise OSError(28, "no space left on device")
        return lines(path)

    monkeypatch.setattr(telemetry, "MAX_BYTES", 200)
    monkeypatch.setattr(telemetry, "LineFile", cramped)
    with Telemetry(tmp_path, (), print, check):
        tools.wait_for(lambda: len(made) > 4)
    assert {file.name for file in tmp_path.iterdir()} == {FILE, OLD_FILE} and snapshots(tmp_path, OLD_FILE)


def until_recorded(enter: Callable[..., Any], run: Path) -> Callable[..., Any]:
    """What is entered ends once two more records are there: the second was made meanwhile."""

    @contextmanager
    def entered(kept: Telemetry, *given: Any) -> Iterator[None]:
        with enter(kept, *given):
            yield
            before = len(written(run))
            tools.wait_for(lambda: len(written(run)) > before + 1)

    return entered


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "moved"])
@pytest.mark.parametrize("full", [0, 1 << 20], ids=["full", "not-full"])
def test_nothing_is_written_where_the_folder_was(tmp_path, quick, monkeypatch, full, deleted):
    """The thread goes on looking. A run that has taken the folder's place keeps its file."""
    looks = []
    monkeypatch.setattr(telemetry, "available_bytes", lambda: looks.append(1) or 1 << 40)
    folder = tmp_path / "run"
    folder.mkdir()
    with EventLog(folder / "events.jsonl") as log, Telemetry(folder, (), print, log.check):
        tools.wait_for(lambda: len(written(folder)) > 1)
        folder.rename(tmp_path / "gone")
        if deleted:
            shutil.rmtree(tmp_path / "gone")
        folder.mkdir()
        (folder / FILE).write_text("another run's")
        monkeypatch.setattr(telemetry, "MAX_BYTES", full)
        before = len(looks)
        tools.wait_for(lambda: len(looks) > before + 3)
    assert [file.read_text() for file in folder.iterdir()] == ["another run's"]


def test_a_run_tells_what_its_view_shows(tmp_path, quick, monkeypatch):
    tools.write_model(tmp_path / "model")
    tools.plan_with(monkeypatch, tools.STAGES)
    began, load = time.perf_counter(), trainer.load_weights
    for name in ("doing", "watching"):
        monkeypatch.setattr(Telemetry, name, until_recorded(getattr(Telemetry, name), tmp_path / "runs/run"))

    def once_recorded(*given: Any, **named: Any) -> Any:
        tools.wait_for(lambda: len(written(tmp_path / "runs/run")) > 0)
        return load(*given, **named)

    monkeypatch.setattr(trainer, "load_weights", once_recorded)
    run = tools.train_here(tmp_path)
    took = time.perf_counter() - began
    view = RunView(run.path)
    assert view.state == "finished" and view.step == view.total_steps == 6
    assert view.process is not None and view.process.alive
    assert view.devices == ("cpu:0", "cpu:1") and view.staleness == 1
    assert view.plan[0].startswith(tools.STAGES) and view.planned_bubble is not None and view.floor_step
    assert view.host is not None and view.host.limit is not None and 0 < view.host.total < view.host.limit
    recorded = snapshots(run.path)
    assert view.taken_up is not None
    assert [*view.recent] == [shot for shot in recorded if shot.time >= view.taken_up][-RECENT:]
    phases = [shot.phase for shot in recorded]
    assert phases.index("loading") < phases.index("training") and "exporting" in phases
    lanes = [lane for shot in recorded for lane in shot.lanes]
    assert {lane.device for lane in lanes} == {"cpu:0", "cpu:1"}
    assert {kind for lane in lanes for kind in lane.busy} == {"F", "FB", "B"}
    assert all(0 <= seconds <= took for lane in lanes for seconds in lane.busy.values())
    assert sum(lane.up for lane in lanes) > 0 and sum(lane.down for lane in lanes) > 0
    assert {lane.step for lane in lanes if lane.step is not None} <= set(range(1, 7))


def test_pauses_and_evaluations_are_told(tmp_path, quick, monkeypatch):
    """Held up until the records are there, as a view shows them."""
    tools.write_model(tmp_path / "model")
    run, loss, look = RunDir(tmp_path / "runs/run"), validation.loss, Saver.poll
    states = []

    def is_now(state: str) -> None:
        tools.wait_for(
            lambda: RunView(run.path).state == state and [shot.phase for shot in written(run.path)][-1:] == [state]
        )
        states.append(state)

    def measured(*arguments):
        is_now("evaluating")
        (run.control_path / "PAUSE").touch()
        return loss(*arguments)

    def looks(saver: Saver) -> None:
        if (run.control_path / "PAUSE").exists():
            is_now("paused")
            (run.control_path / "PAUSE").unlink()
        look(saver)

    monkeypatch.setattr(validation, "loss", measured)
    monkeypatch.setattr(Saver, "poll", looks)
    tools.train_here(tmp_path, "data.val_size=0.3", "train.eval_steps=2", "train.max_steps=4")
    assert states == ["evaluating", "paused"] * 2


def test_that_little_memory_is_left_is_told_once(tmp_path, quick, monkeypatch):
    taken, free, told = psutil.Process().memory_info().rss, [1 << 40], []
    little = taken // 100  # little even if the process has freed memory since
    monkeypatch.setattr(telemetry, "available_bytes", lambda: free[0])
    with Telemetry(tmp_path, (), told.append, check):
        for left, count in ((taken, 0), (little, 1), (taken, 1), (little, 1)):
            free[0] = left
            before = len(written(tmp_path))  # counted afterwards: the second of the next records has the new value
            tools.wait_for(lambda before=before: len(written(tmp_path)) > before + 2)
            assert len(told) == count
    assert told[0].free == little
    assert (told[0].taken, told[0].free) in [(shot.process, shot.free) for shot in snapshots(tmp_path)]


@pytest.mark.parametrize("error", [ValueError("no driver"), SystemExit(3)], ids=["error", "exit"])
def test_an_error_ends_the_records_and_nothing_else(tmp_path, quick, monkeypatch, error):
    told: list[Any] = []
    monkeypatch.setattr(Telemetry, "_snapshot", Mock(side_effect=error))
    with Telemetry(tmp_path, (), told.append, check):
        tools.wait_for(lambda: bool(told))
    assert [event.message for event in told] == [f"{type(error).__name__}: {error}"]


def test_a_thread_that_hangs_is_left_behind(tmp_path, monkeypatch):
    told: list[Any] = []
    ends = threading.Event()
    monkeypatch.setattr(Telemetry, "_snapshot", lambda kept: ends.wait())
    with Telemetry(tmp_path, (), told.append, check, 0.1):
        pass
    ends.set()
    assert [event.message for event in told] == ["did not end within 0.1 seconds"]


def test_a_file_that_cannot_be_opened_is_told(tmp_path):
    told: list[Any] = []
    (tmp_path / FILE).mkdir()
    with Telemetry(tmp_path, (), told.append, check):
        pass
    (event,) = told
    assert event.sentence() == f"telemetry failed and is disabled: {tmp_path / FILE}: Is a directory"
