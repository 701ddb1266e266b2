"""Runs of a folder: which there are, and what is said of each."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rptrain.runs.folder import listing
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.listing import Listing, folder_bytes, newest, summaries, summarize, training_beside
from rptrain.runs.view.pace import REPORTS
from rptrain.runs.view.run_view import RunView
from rptrain.utils.errors import UserError

from ..tui.recorded import BEGAN, make_run
from .test_view import OWN, START, process, step, write


def make(folder: Path, name: str, *records: dict) -> Path:
    run = folder / name
    run.mkdir()
    (run / "config.toml").write_text("x = 1\n")
    if records:
        write(run, *records)
    return run


def test_each_run_in_a_line(tmp_path):
    gone = type(OWN)(OWN.host, OWN.pid, "another")
    make(tmp_path, "begun")
    make(
        tmp_path, "first", START, process(), step(1, 4.0), step(5, 3.0), {"event": "finished", "step": 5, "time": 160.0}
    )
    later = {**START, "time": 500.0}
    make(tmp_path, "killed", later, process(gone, time=500.5), {**step(2, None), "time": 530.0})
    (tmp_path / "no-run").mkdir()
    assert [(run.path.name, run.state, run.step, run.loss, run.seconds) for run in summaries(tmp_path)] == [
        ("killed", "dead", 2, None, 30.0),
        ("first", "finished", 5, 3.0, 60.0),
        ("begun", "new", 0, None, None),
    ]
    assert summaries(tmp_path / "nowhere") == []
    (first,) = (run for run in summaries(tmp_path) if run.path.name == "first")
    assert (first.model, first.total_steps, first.began) == ("tiny", 10, 100.0)
    assert json.loads(json.dumps(first.to_dict()))["path"] == str(tmp_path / "first")


def test_a_long_run_is_glanced_at(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "GLANCE", 1 << 16)
    first, second = (
        {"event": "evaluation", "time": 102.0 * n, "step": n, "name": "loss", "score": 4.0 / n} for n in (1, 2)
    )
    best = second | {"step": 3, "score": 1.5}
    steps = [step(n) for n in range(1, 2000)]
    start = START | {"trained": 0.0, "time": 90.0}
    resumed = START | {"trained": 70.0, "time": steps[1500]["time"]}
    middle = (*steps[:700], best, *steps[700:1203], second, *steps[1203:1500], resumed, process(), *steps[1500:])
    run = make(tmp_path, "long", start, process(), first, *middle, {"event": "stopped", "time": 5000.0, "step": 1999})
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace('": ', '":'))  # as runs write them
    assert events.stat().st_size > 4 * listing.GLANCE
    (summary,) = summaries(tmp_path)
    assert (summary.step, summary.state, summary.began) == (1999, "stopped", 90.0)
    assert summary.validation_loss == 2.0, "the newest one, in the middle"
    assert (summary.best_loss, summary.best_step) == (1.5, 3), "all of them are read"
    assert summary.seconds == 70.0 + 5000.0 - resumed["time"]


def test_the_speed_is_a_median_that_one_slow_step_does_not_change(tmp_path):
    speeds = [900.0, *([100.0] * REPORTS)]
    speeds[-1] = 3.0
    steps = ({**step(n), "tokens_per_second": speed} for n, speed in enumerate(speeds, 1))
    make(tmp_path, "run", START, *steps, {"event": "finished", "step": len(speeds), "time": 900.0})
    make(tmp_path, "begun")
    assert [run.tokens_per_second for run in summaries(tmp_path)] == [100.0, None]


def test_runs_that_ended_are_read_again_only_if_they_change(tmp_path, monkeypatch):
    finished = {"event": "finished", "step": 5, "time": 160.0}
    done = make(tmp_path, "done", START, process(), step(5, 3.0), finished)
    make(tmp_path, "live", {**START, "time": 50.0}, process(), step(1))
    read: list[str] = []
    summarize = listing.summarize
    monkeypatch.setattr(listing, "summarize", lambda view: read.append(view.path.name) or summarize(view))
    runs = Listing(tmp_path)
    os.utime(done, (1, 1))  # a later change has another time, whatever the resolution of the clock
    assert runs.read()[0] == runs.read()[0]
    assert sorted(read) == ["done", "live", "live"]
    with (done / "events.jsonl").open("a") as file:
        file.write(json.dumps({**START, "time": 300.0}) + "\n" + json.dumps({**process(), "time": 300.5}) + "\n")
    assert runs.read()[0].state == "loading"
    with (done / "events.jsonl").open("a") as file:
        file.write(json.dumps({**finished, "time": 400.0}) + "\n")
    (first, _) = runs.read()
    assert first.state == "finished" and first.seconds == 160.0
    (done / "model").mkdir()
    (done / "model" / "weights").write_bytes(b"x" * 10)
    assert runs.read()[0].nbytes == first.nbytes + 10


@pytest.mark.parametrize("end", [None, "finished"], ids=["active", "finished"])
def test_a_brief_view_tells_the_same(tmp_path, end):
    """Also of a run that was resumed, where the snapshots of the process before count."""
    make_run(tmp_path, "once", steps=20, end=end)
    again = make_run(tmp_path, "again", steps=20, alive=False)
    later = make_run(tmp_path, "later", steps=20, end=end, began=BEGAN + 1e4)
    lines = (again / "events.jsonl").read_text().splitlines(keepends=True)
    (again / "events.jsonl").write_text("".join(lines[:-5]))  # its last sign of life is a snapshot
    for name in ("events.jsonl", "lanes.jsonl"):
        last = [(run / name).read_text().splitlines(keepends=True)[-50:] for run in (again, later)]
        (again / name).write_text("".join(last[0] + last[1]))  # few enough that a list reads the snapshots of both
    for run in summaries(tmp_path):
        whole = summarize(RunView(run.path))
        if end is None:
            run, whole = replace(run, seconds=None), replace(whole, seconds=None)  # up to now
        assert run == whole


def test_the_newest_run_is_found_without_reading_the_others(tmp_path, monkeypatch):
    """Also where its records begin with another one, or cannot be read."""
    for number, name in enumerate(("b", "c", "a")):
        make_run(tmp_path, name, steps=2, began=BEGAN + number % 2)
    make(tmp_path, "begun")
    odd = make(tmp_path, "odd", {"event": "memory_low"}, {**START, "time": 5.0})
    (odd / "events.jsonl").write_text("[1]\n{\n" + (odd / "events.jsonl").read_text())
    assert newest(tmp_path) == summaries(tmp_path)[0].path == tmp_path / "c"
    monkeypatch.setattr(listing, "RunView", None)
    assert newest(tmp_path) == tmp_path / "c"
    for name in "abc":
        listing.shutil.rmtree(tmp_path / name)
    assert newest(tmp_path) == odd
    assert newest(tmp_path / "nowhere") is None


def test_runs_that_are_read_are_told_of_the_newest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "AT_ONCE", 2)
    monkeypatch.setattr(listing, "PERIOD", 0.0)
    for number in range(5):
        make_run(tmp_path, f"run-{number}", steps=2, began=BEGAN + number)
        os.utime(tmp_path / f"run-{number}" / "config.toml", (BEGAN + number, BEGAN + number))
    told: list[tuple[list[str], int]] = []
    found = Listing(tmp_path).read(lambda runs, total: told.append(([run.path.name for run in runs], total)))
    names = [run.path.name for run in found]
    assert names == [f"run-{number}" for number in (4, 3, 2, 1, 0)]
    assert told == [(names[:count], 5) for count in (2, 3, 4, 5)]


def test_the_size_of_a_folder(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"123")
    (tmp_path / "link").symlink_to("/")
    assert folder_bytes(tmp_path) == 8 + len("/")
    scandir = os.scandir

    def refuse(folder):
        if folder.name == "b":
            raise PermissionError(folder)
        return scandir(folder)

    monkeypatch.setattr("rptrain.runs.folder.listing.os.scandir", refuse)
    assert folder_bytes(tmp_path) == 3 + len("/")


def test_a_run_that_a_process_trains_is_not_deleted(tmp_path):
    """Whatever its records say: they may have been read in part."""
    folder = make(tmp_path, "live", START, process(), step(1))
    with EventLog(folder / "events.jsonl"), pytest.raises(UserError, match="another process is training this run"):
        listing.delete(folder)
    assert (folder / "events.jsonl").is_file()
    listing.delete(folder)
    assert not folder.exists()


def test_names_are_shown_without_what_a_terminal_obeys(tmp_path):
    make(tmp_path, "a\x1b]0;title\x07[bold]b", START, process(), step(1))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    listing.show(summaries(tmp_path), console)
    shown = console.export_text()
    assert "\x1b" not in shown and "\x07" not in shown and "␛]0;title␇[bold]b" in shown


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (120, "run state step loss tokens/s began took size"),
        (80, "run state step loss tokens/s began took"),
        (60, "run state step loss tokens/s"),
        (48, "run state step loss"),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_whole(tmp_path, width, columns):
    records = (START, process(), step(12345), {"event": "finished", "step": 12345, "time": 493.0})
    make(tmp_path, "support-of-all", *records)
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    listing.show(summaries(tmp_path), console)
    heading, line = console.export_text().splitlines()
    assert heading.split() == columns.split() and "…" not in line
    assert line.startswith("support-of-all  finished  12345/10")


def test_a_run_that_trains_beside_a_model(tmp_path):
    """The run of a checkpoint, or one in the same folder; not one that ended, or whose process is gone."""
    checkpoint = make_run(tmp_path / "runs", "done", end="finished", alive=False) / "checkpoints/checkpoint-4"
    make_run(tmp_path / "runs", "dead", alive=False)
    assert training_beside(checkpoint) == training_beside(tmp_path / "model") == ""
    now = make_run(tmp_path / "runs", "now")
    for source in (checkpoint, now, now / "model", tmp_path / "runs/exported"):
        assert training_beside(source) == "now"
    assert training_beside(tmp_path / "model") == ""
