"""Runs that several processes train: what a view makes of the records of all."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from rptrain.runs.folder import listing
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.listing import summaries
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.lanes import LaneRecord
from rptrain.runs.records.process import ProcessId, other_folders
from rptrain.runs.view.run_view import SPREAD, RunView
from rptrain.utils.errors import UserError

from .test_view import OWN, START, process, snapshot, step, write, write_lanes

GONE = ProcessId(OWN.host, OWN.pid, "another")


def folder_of(run: Path, rank: int) -> Path:
    folder = RunDir(run).of_process(rank).path
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def begin(run: Path, rank: int, count: int, time: float = 100.0, identity: ProcessId = OWN) -> None:
    """The first records of a process, one of `count`."""
    started = process(identity, time + 0.5) | {"processes": count}
    write(folder_of(run, rank), START | {"time": time}, started)


def test_the_other_processes_by_rank(tmp_path: Path):
    begin(tmp_path, 0, 12)
    view = RunView(tmp_path)
    assert view.process_count == 12 and view.processes == () and view.name == f"process 0 on {OWN.host}"
    for rank in (11, 2, 1):
        begin(tmp_path, rank, 12, 99.0)
    assert view.refresh() and not view.refresh()
    assert [one.rank for one in view.processes] == [1, 2, 11]
    one = view.processes[0]
    assert one.name == f"process 1 on {OWN.host}" and one.path == folder_of(tmp_path, 1)
    assert one.host is not None and one.host.total == 90 and one.devices == ("cpu:0", "cpu:1")
    assert one.state == "loading"
    write_lanes(one.path, snapshot(150.0, LaneRecord("cpu:0", "computing", busy={"F": 0.25})))
    assert view.refresh() and one.now is not None and one.state == "training" and view.now is None
    assert len(one.lanes) == 1 and view.lanes == ()
    assert [one.rank for one in RunView(tmp_path).processes] == [1, 2, 11]  # at once
    assert [one.rank for one in RunView(tmp_path, large=1 << 10).processes] == [1, 2, 11]


def test_the_bubble_is_that_of_all_devices(tmp_path: Path):
    for rank, busy in enumerate((0.25, 0.125)):
        begin(tmp_path, rank, 2)
        write_lanes(folder_of(tmp_path, rank), snapshot(150.0, LaneRecord("cpu:0", "computing", busy={"F": busy})))
    write(tmp_path, step(1))
    assert RunView(tmp_path).bubble == pytest.approx(0.25)


def test_what_is_left_from_an_earlier_start_is_not_shown(tmp_path: Path):
    for rank in range(4):
        begin(tmp_path, rank, 4)
    write(folder_of(tmp_path, 1), {"event": "failed", "time": 110.0, "message": "no memory"})
    view = RunView(tmp_path)
    assert [one.rank for one in view.processes] == [1, 2, 3] and view.failure is not None
    later = 100.0 + 2 * SPREAD
    begin(tmp_path, 0, 3, later)
    view.refresh()
    assert view.processes == () and view.failure is None and view.whole_log is view.log
    for rank in (1, 2):
        begin(tmp_path, rank, 3, later - SPREAD / 2)  # the clock of its machine is late
    view.refresh()
    assert [(one.rank, one.state) for one in view.processes] == [(1, "loading"), (2, "loading")]
    assert view.failure is None and "no memory" not in "".join(line.text for line in view.whole_log)
    write(tmp_path, START | {"time": later + 1}, process(time=later + 1))
    view.refresh()
    assert view.process_count == 1 and view.processes == ()


def test_a_failure_names_the_process_that_failed_first(tmp_path: Path):
    for rank in range(3):
        begin(tmp_path, rank, 3)
    write(tmp_path, step(1))
    write(folder_of(tmp_path, 1), {"event": "memory_low", "time": 103.0, "taken": 5, "free": 1})
    view = RunView(tmp_path)
    assert view.failure is None and view.state == "training"
    write(folder_of(tmp_path, 1), {"event": "failed", "time": 105.0, "message": "out of memory"})
    view.refresh()
    name = f"process 1 on {OWN.host}"
    assert view.failure == f"{name}: out of memory"
    assert (view.state, view.processes[0].state, view.processes[0].own_failure) == (
        "training",
        "failed",
        "out of memory",
    )
    lost = {"event": "failed", "time": 108.0, "message": f"{name} is lost"}
    for rank in (2, 0):
        write(folder_of(tmp_path, rank), lost)
    view.refresh()
    assert view.state == "failed" and view.failure == f"{name}: out of memory" and view.own_failure == lost["message"]
    shown = [(line.text, line.kind) for line in view.whole_log if line.kind != "info"]
    assert [kind for _, kind in shown] == ["warning", "error", "error"] and shown[0][0].startswith(f"{name}: only 1 B")
    assert [text for text, _ in shown[1:]] == [f"{name}: out of memory", f"{name} is lost"]  # once
    assert [line.time for line in view.whole_log] == sorted(line.time for line in view.whole_log)


def test_a_failure_of_the_first_process_is_told_as_it_is(tmp_path: Path):
    for rank in range(2):
        begin(tmp_path, rank, 2)
    write(tmp_path, {"event": "failed", "time": 105.0, "message": "the disk is full"})
    write(folder_of(tmp_path, 1), {"event": "failed", "time": 106.0, "message": "process 0 is lost"})
    assert RunView(tmp_path).failure == "the disk is full"


def test_a_run_is_dead_if_its_first_process_is(tmp_path: Path):
    begin(tmp_path, 0, 2)
    begin(tmp_path, 1, 2, identity=GONE)
    write(tmp_path, step(1))
    view = RunView(tmp_path)
    assert (view.state, view.processes[0].state, view.ended) == ("training", "dead", False)
    begin(tmp_path, 0, 2, 100.1, GONE)
    view.refresh()
    assert view.state == "dead"


def test_what_is_read_in_another_thread_changes_nothing_until_it_is_added(tmp_path: Path):
    begin(tmp_path, 0, 2)
    view = RunView(tmp_path)
    begin(tmp_path, 1, 2)
    news = view.news()
    assert view.processes == () and view.add(news) and len(view.processes) == 1


def test_only_folders_in_the_run_that_are_named_by_a_rank_are_read(tmp_path: Path):
    run = tmp_path / "run"
    begin(run, 0, 10**12)
    begin(run, 1, 2)
    for name in ("0", "01", "-1", "1.5", "x", "²", "9" * 200):
        (run / "processes" / name).mkdir()
    begin(tmp_path / "elsewhere", 0, 2)
    (run / "processes" / "2").symlink_to(tmp_path / "elsewhere")
    (run / "processes" / "3").write_text("a file\n")
    (run / "processes" / "4").symlink_to(run)
    assert list(other_folders(run)) == [1, 3, 4]
    assert [one.rank for one in RunView(run).processes] == [1, 4]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "processes").symlink_to(run / "processes")
    assert other_folders(tmp_path / "other") == {}
    (run / "x").write_text("a file\n")
    assert other_folders(run / "x") == {}


def test_records_of_processes_that_make_no_sense_are_passed_over(tmp_path: Path):
    slow = {"event": "process_slow", "time": 101.0, "step": 20, "process": "process 1 on there", "seconds": 3.0}
    write(tmp_path, START, process() | {"processes": "two"})
    write(tmp_path, slow | {"median": 0}, slow | {"median": 1.5}, slow)
    view = RunView(tmp_path)
    assert view.process_count == 1
    unread = "a record that cannot be read was skipped"
    told = "step 20: process 1 on there takes 2.0 times as long for its share as the others"
    assert [line.text for line in view.log][1:] == [unread, unread, told, unread]


def test_a_summary_counts_the_processes(tmp_path: Path):
    for name, count in (("one", 1), ("two", 2)):
        begin(tmp_path / name, 0, count)
        (tmp_path / name / "config.toml").write_text("x = 1\n")
    begin(tmp_path / "two", 1, 2)
    assert {run.path.name: run.processes for run in summaries(tmp_path)} == {"one": 1, "two": 2}
    assert {json.loads(json.dumps(run.to_dict()))["processes"] for run in summaries(tmp_path)} == {1, 2}
    two, one = sorted(summaries(tmp_path), key=lambda run: -run.processes)
    for shown, column in (((two, one), True), ((one,), False)):
        console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        listing.show(iter(shown), console)
        lines = console.export_text().splitlines()
        assert ("processes" in lines[0]) is lines[1].rstrip().endswith(" 2") is column


def test_a_run_is_not_deleted_while_any_process_trains_it(tmp_path: Path):
    begin(tmp_path / "run", 0, 2)
    begin(tmp_path / "run", 1, 2)
    events = RunDir(tmp_path / "run").of_process(1).events_path
    with EventLog(events), pytest.raises(UserError, match=r"1/events\.jsonl: another process is training this run"):
        listing.delete(tmp_path / "run")
    assert events.is_file() and (tmp_path / "run" / "events.jsonl").is_file()
    listing.delete(tmp_path / "run")
    assert not (tmp_path / "run").exists()
