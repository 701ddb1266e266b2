"""A view of a run: what it makes of events, half-written lines, resumed and dead runs."""

import json
import os
import time
from dataclasses import fields, replace
from math import nan
from pathlib import Path

import pytest

from rptrain.runs.folder.ending import ending_of
from rptrain.runs.folder.listing import summarize
from rptrain.runs.records.events import Progress, to_line
from rptrain.runs.records.lanes import FILE, LaneRecord, OptimizerState, Snapshot, StepNumbers
from rptrain.runs.records.process import ProcessId
from rptrain.runs.view.process_view import ENDED
from rptrain.runs.view.run_view import RunView
from rptrain.tui.runs.run_rows import Layout, Mark

OWN = ProcessId.of(os.getpid())
START = {
    "event": "run_started",
    "time": 100.0,
    "config_hash": "abc",
    "version": "0.1.0",
    "devices": ["cpu:0", "cpu:1"],
    "model": "tiny",
    "parameters": 430_000,
}
MEMORY = [
    {"name": "host", "kind": "host memory", "parts": [["weights", 30], ["moments", 60]], "limit": 1000},
    {"name": "cpu:0", "kind": "GPU memory", "parts": [["slots", 5]], "limit": 7},
]


def process(identity: ProcessId = OWN, time: float = 100.5) -> dict:
    return {
        "event": "process_started",
        "time": time,
        "pid": identity.pid,
        "host": identity.host,
        "birth": identity.birth,
        "total_steps": 10,
        "staleness": 1,
        "memory": MEMORY,
    }


def step(number: int, loss: float | None = 2.0, skipped: bool = False) -> dict:
    return {
        "event": "step",
        "time": 100.0 + 2 * number,
        "step": number,
        "loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": 1.5,
        "tokens": 64,
        "supervised": 32,
        "tokens_per_second": 320.0,
        "skipped": skipped,
    }


def write(folder: Path, *records: dict, end: str = "\n") -> None:
    with open(folder / "events.jsonl", "a", encoding="utf-8") as file:
        file.write("\n".join(json.dumps({"schema": 1, **record}) for record in records) + end)


def snapshot(time: float, *lanes: LaneRecord, phase: str = "training") -> Snapshot:
    return Snapshot(time, 0.25, phase, 100, 200, lanes, OptimizerState("waiting", 1, 0.5))  # type: ignore[arg-type]


def write_lanes(folder: Path, *snapshots: Snapshot) -> None:
    with open(folder / FILE, "a", encoding="utf-8") as file:
        file.writelines(shot.to_line() + "\n" for shot in snapshots)


def test_a_folder_without_events_is_new(tmp_path):
    view = RunView(tmp_path)
    assert (view.state, view.step, view.loss, view.eta, view.lanes) == ("new", 0, None, None, ())
    write(tmp_path, START, process())
    assert view.refresh() and view.state == "loading"
    assert not view.refresh()


def test_what_a_run_tells(tmp_path):
    write(tmp_path, START, process(), {"event": "plan", "time": 101.0, "lines": ["F0-1 FB2-2", "device 0: F0-1"]})
    view = RunView(tmp_path)
    write(tmp_path, step(1, 4.0), step(2, None, skipped=True), step(3, 3.0))
    assert view.refresh()
    assert (view.state, view.step, view.total_steps, view.loss, view.progress.skipped) == ("training", 3, 10, 3.0, 1)
    assert view.progress.seconds_per_step == 2.0 and view.eta == 14.0
    assert view.plan == ("F0-1 FB2-2", "device 0: F0-1") and view.staleness == 1
    assert view.host is not None and (view.host.total, view.host.limit) == (90, 1000)
    assert view.steps.points("loss", 10) == ([1.0, 3.0], [4.0, 3.0])
    assert [line.kind for line in view.log] == ["info", "info", "warning"]
    write(tmp_path, {"event": "estimated", "time": 107.0, "step_seconds": 1.5, "bubble": 0.1, "floor_seconds": 1.0})
    view.refresh()
    assert view.share_of_floor == 0.5


def test_the_numbers_of_steps_without_records(tmp_path):
    """Only some steps have a record of their own, but lanes have the numbers of each."""
    write(tmp_path, START, process())
    write_lanes(tmp_path, replace(snapshot(101.0), last=StepNumbers(1, 4.0, 1e-4, 2.0, None, 3.0)), snapshot(101.3))
    view = RunView(tmp_path)
    assert (view.step, view.loss, view.tokens_per_second, view.progress.seconds_per_step, view.eta) == (
        1,
        4.0,
        None,
        3.0,
        27.0,
    )
    write(tmp_path, step(2, 3.0), step(3, 2.5))
    view.refresh()
    assert (view.step, view.loss, view.tokens_per_second, view.progress.seconds_per_step) == (3, 2.5, 320.0, 2.0)
    assert view.latest == StepNumbers(3, 2.5, 1e-3, 1.5, 320.0)
    write_lanes(tmp_path, replace(snapshot(108.0), last=StepNumbers(5, None, 1e-4, None, 100.0, 2.0)))
    view.refresh()
    assert (view.step, view.loss, view.tokens_per_second, view.eta) == (5, 2.5, 100.0, 10.0)
    write(
        tmp_path,
        START | {"time": 120.0},
        process(time=120.0),
        {"event": "resumed", "time": 121.0, "step": 2, "path": "x"},
    )
    view.refresh()
    assert (view.step, view.loss) == (2, 3.0)


def test_steps_that_warm_up_have_no_speed_and_a_run_without_others_has_that_of_all(tmp_path):
    slow = [step(number) | {"warm_up": True, "tokens_per_second": speed} for number, speed in ((1, 3.0), (2, 9.0))]
    write(tmp_path, START, process(), *slow)
    view = RunView(tmp_path)
    assert view.tokens_per_second is None and view.average_tokens_per_second is None
    write(tmp_path, {"event": "stopped", "time": 110.0, "step": 2, "by": "STOP"})
    assert view.refresh() and view.average_tokens_per_second == 9.0 and view.tokens_per_second is None
    write(tmp_path, START | {"time": 120.0}, process(time=120.0), *(step(n) | {"time": 120.0 + n} for n in (3, 4)))
    write(tmp_path, {"event": "finished", "time": 130.0, "step": 4})
    assert view.refresh() and view.tokens_per_second == 320.0 and view.average_tokens_per_second is None
    assert view.steps.points("tokens_per_second", 9) == ([3.0, 4.0], [320.0, 320.0])


def test_the_time_between_processes_does_not_count(tmp_path):
    write(tmp_path, START, process(), step(1), step(2))  # 100 to 104 s
    view = RunView(tmp_path)
    assert view.seconds(110.0) == 10.0
    resumed = {"event": "resumed", "time": 901.0, "step": 2, "path": "x"}
    write(tmp_path, START | {"time": 900.0}, process(time=900.0), resumed)
    view.refresh()
    assert view.seconds(903.0) == 7.0
    write(tmp_path, step(3) | {"time": 910.0}, {"event": "finished", "time": 912.0, "step": 3})
    view.refresh()
    assert view.seconds(10_000.0) == 16.0


def test_a_process_records_how_long_earlier_ones_took(tmp_path):
    """Their last records may be snapshots, which are replaced, or events that a thinned view does not have."""
    write(tmp_path, START, process(), step(1))
    write_lanes(tmp_path, snapshot(140.0))
    assert RunView(tmp_path).trained == 40.0
    write(tmp_path, START | {"time": 900.0, "trained": 40.0}, process(time=900.0), step(2) | {"time": 910.0})
    view = RunView(tmp_path)
    assert (view.trained, view.seconds(915.0)) == (50.0, 55.0)
    assert [view.training_time.at(time) for time in (90.0, 110.0, 500.0, 900.0, 905.0)] == [0.0, 10.0, 40.0, 40.0, 45.0]


def test_pauses_do_not_count_as_training(tmp_path):
    write(tmp_path, START, process(), step(2), {"event": "paused", "time": 105.0, "step": 2})
    view = RunView(tmp_path)
    assert view.seconds(300.0) == view.trained == 5.0 and view.tokens_per_second is None
    assert [view.training_time.at(time) for time in (103.0, 200.0)] == [3.0, 5.0]
    write(tmp_path, {"event": "continued", "time": 305.0, "step": 2}, step(3) | {"time": 307.0})
    view.refresh()
    assert (view.seconds(310.0), view.trained) == (10.0, 7.0) and view.tokens_per_second is not None
    assert [view.training_time.at(time) for time in (103.0, 200.0, 306.0)] == [3.0, 5.0, 6.0]
    write(tmp_path, {"event": "paused", "time": 308.0, "step": 3}, step(4) | {"time": 400.0})  # its end was not read
    write(tmp_path, START | {"time": 900.0}, process(time=900.0))
    view.refresh()
    assert view.seconds(901.0) == 9.0


def test_two_steps_that_end_together_give_no_pace(tmp_path):
    write(tmp_path, START, process(), step(1), step(2) | {"time": 102.004})
    view = RunView(tmp_path)
    assert view.progress.seconds_per_step is None and view.eta is None
    write(tmp_path, step(3) | {"time": 104.0})
    view.refresh()
    assert view.progress.seconds_per_step == 1.0


def test_a_pause_is_not_part_of_the_pace(tmp_path):
    write(tmp_path, START, process(), step(1), step(2), {"event": "paused", "time": 104.0, "step": 2})
    write(tmp_path, {"event": "continued", "time": 904.0, "step": 2}, step(3) | {"time": 906.0})
    view = RunView(tmp_path)
    assert view.progress.seconds_per_step is None and view.eta is None, "one report since the pause gives none"
    write_lanes(tmp_path, replace(snapshot(907.0), last=StepNumbers(4, 1.0, 1e-4, None, 9.0, 2.5)))
    view.refresh()
    assert view.progress.seconds_per_step == 2.5
    write(tmp_path, step(5) | {"time": 910.0})
    view.refresh()
    assert (view.progress.seconds_per_step, view.eta) == (2.0, 10.0)


def test_numbers_of_the_process_before_are_not_those_of_the_new_one(tmp_path):
    write(tmp_path, START, process(), step(1), step(2), step(3))
    write(
        tmp_path,
        START | {"time": 300.0},
        process(time=300.5),
        {"event": "resumed", "time": 301.0, "step": 2, "path": "c"},
    )
    view = RunView(tmp_path)
    assert (view.state, view.step, view.tokens_per_second) == ("loading", 2, None)
    write(tmp_path, step(3) | {"time": 310.0})
    view.refresh()
    assert view.tokens_per_second == 320.0


def test_idle_time_of_a_start_or_a_pause_is_no_bubble(tmp_path):
    lane = LaneRecord("cpu:0", "computing", "F0-1", "F", busy={"F": 0.2})
    write(tmp_path, START, process())
    write_lanes(tmp_path, *(snapshot(101.0 + n / 4, lane) for n in range(20)))
    view = RunView(tmp_path)
    assert view.lanes and view.bubble is None, "no step is completed"
    write(tmp_path, step(3))  # at 106.0
    write_lanes(tmp_path, *(snapshot(106.0 + n / 4, lane) for n in range(20)))
    view.refresh()
    assert view.bubble is None
    write_lanes(tmp_path, snapshot(111.0, lane))
    view.refresh()
    assert view.bubble == pytest.approx(0.2)
    write(tmp_path, {"event": "paused", "time": 111.5, "step": 3})
    view.refresh()
    assert view.bubble is None
    write(tmp_path, {"event": "continued", "time": 120.0, "step": 3}, step(4) | {"time": 121.0})
    write_lanes(tmp_path, *(snapshot(121.0 + n / 4, lane) for n in range(20)))
    view.refresh()
    assert view.bubble is None
    write_lanes(tmp_path, snapshot(126.0, lane))
    view.refresh()
    assert view.bubble == pytest.approx(0.2)


def test_a_checkpoint_tells_the_last_step_of_a_stopped_run(tmp_path):
    write(tmp_path, START, process(), *(step(n) for n in range(1, 4)))
    write(tmp_path, {"event": "checkpoint_saved", "time": 104.0, "step": 5, "path": "c"})
    write(tmp_path, {"event": "stopped", "time": 104.0, "step": 5, "by": "signal"})
    view = RunView(tmp_path)
    assert (view.step, view.state) == (5, "stopped") and view.latest is not None and view.latest.step == 3


def test_the_speed_of_a_run_that_ended_is_that_of_its_last_reports(tmp_path):
    write(tmp_path, START, process(), *(step(n) for n in range(1, 4)))
    write_lanes(tmp_path, replace(snapshot(107.0), last=StepNumbers(4, 1.0, 1e-4, None, 9000.0, 0.1)))
    view = RunView(tmp_path)
    assert view.tokens_per_second == 9000.0
    write(tmp_path, {"event": "stopped", "time": 108.0, "step": 4})
    view.refresh()
    assert view.tokens_per_second == 320.0


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ({"event": "finished", "step": 3}, "finished"),
        ({"event": "failed", "message": "out of memory"}, "failed"),
        ({"event": "stopped", "step": 3, "by": "STOP"}, "stopped"),
        ({"event": "paused", "step": 3}, "paused"),
        ({"event": "of_a_later_version", "step": 3}, "training"),
    ],
)
def test_how_it_goes_on(tmp_path, record, state):
    write(tmp_path, START, process(), step(3), {"time": 110.0, **record})
    write_lanes(tmp_path, snapshot(109.0))
    view = RunView(tmp_path)
    assert view.state == state
    assert view.ended == (state in ("finished", "failed", "stopped"))
    assert view.failure == record.get("message")


def test_a_half_written_line_waits_for_its_end(tmp_path):
    write(tmp_path, START, process(), step(1), end="\n" + json.dumps(step(2))[:30])
    view = RunView(tmp_path)
    assert view.step == 1
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write(json.dumps(step(2))[30:] + "\n")
    assert view.refresh() and view.step == 2


def test_lines_that_are_no_records_are_passed_over(tmp_path):
    write(tmp_path, START, process(), step(1))
    (tmp_path / "events.jsonl").open("a").write('no json\n[1]\n"x"\n\0\0\n')
    write(tmp_path, step(2))
    assert RunView(tmp_path).step == 2


def test_a_resumed_run_forgets_what_it_does_again(tmp_path):
    saved = [{"event": "checkpoint_saved", "time": 103.0 + n, "step": n, "path": f"c{n}"} for n in (2, 4)]
    said = {"event": "sample", "time": 107.5, "step": 4, "prompt": "2 + 2?", "text": "5"}
    write(tmp_path, START, process(), step(1), step(2), saved[0], step(3), step(4), saved[1], said, step(5))
    view = RunView(tmp_path)
    assert view.results.samples == [{"step": 4, "prompt": "2 + 2?", "text": "5"}]
    assert [checkpoint.step for checkpoint in view.results.checkpoints] == [2, 4]
    again = {**START, "time": 200.0}
    write(tmp_path, again, process(time=200.1), {"event": "resumed", "time": 201.0, "step": 2, "path": "c2"})
    view.refresh()
    assert (view.step, view.state, view.eta) == (2, "loading", None)
    assert [checkpoint.step for checkpoint in view.results.checkpoints] == [2] and view.results.samples == []
    write(tmp_path, {**step(3, 7.0), "time": 300.0})
    view.refresh()
    assert view.eta is None, "the pace is that of the process that trains"
    assert list(view.steps.column("step")) == [1, 2, 3] and view.loss == 7.0
    assert (view.began, view.taken_up) == (100.0, 200.0)


def score(number: int, value: float | None) -> dict:
    return {"event": "evaluation", "time": 100.0 + 2 * number, "step": number, "name": "loss", "score": value}


def test_a_lower_validation_loss_with_the_same_digits_is_not_marked(tmp_path):
    write(tmp_path, START, process(), score(1, 0.14319), score(2, 0.14318), score(3, 0.1431))
    view = RunView(tmp_path)
    marked = [line.text.endswith("the best so far") for line in view.log if "validation loss" in line.text]
    assert marked == [True, False, True] and view.results.best == view.results.scores[2]


def test_the_best_validation_loss_is_marked_and_that_of_void_steps_is_forgotten(tmp_path):
    write(tmp_path, START, process(), score(1, None), score(2, 2.5), score(3, 2.75), score(4, 2.0), score(5, 2.0))
    view = RunView(tmp_path)
    assert view.results.best == view.results.scores[3] and view.results.validation_loss == 2.0
    assert [line.text for line in view.log if "best" in line.text] == [
        "step 2: validation loss 2.5000, the best so far",
        "step 4: validation loss 2.0000, the best so far",
    ]
    write(tmp_path, START, process(), {"event": "resumed", "time": 200.0, "step": 3, "path": "c"})
    assert view.refresh() and view.results.best == view.results.scores[1]


def test_the_log_of_a_resumed_run_tells_of_a_death_before(tmp_path, monkeypatch):
    monkeypatch.setattr("rptrain.runs.view.values.format_moment", str)
    earlier = ProcessId(OWN.host, 1, f"{OWN.birth.partition('/')[0]}/1")
    again = {"event": "resumed", "time": 301.0, "step": 2, "path": "c"}
    write(tmp_path, START, process(earlier), step(1), step(2), step(3))
    write(tmp_path, START | {"time": 300.0}, process(ProcessId(OWN.host, 2, "other boot/1"), time=300.5), again)
    write(tmp_path, START | {"time": 400.0}, process(time=400.5), again | {"time": 401.0})
    write(tmp_path, {"event": "stopped", "time": 402.0, "step": 2}, START | {"time": 500.0}, process(time=500.5))
    ends = [(line.time, line.text, line.kind) for line in RunView(tmp_path).log if "before ended" in line.text]
    said = "the process before ended after step {} without a last record, last seen {}: the machine was restarted"
    assert ends == [(300.5, said.format(3, 106.0), "warning"), (400.5, said.format(2, 301.0), "warning")]
    write(tmp_path, START | {"time": 600.0}, process(ProcessId(OWN.host, 3, OWN.birth), time=600.5))
    assert "perhaps killed (SIGKILL)" in RunView(tmp_path).log[-1].text


def test_a_death_is_after_the_last_step_that_was_completed_even_if_it_was_not_reported(tmp_path):
    """The snapshots of the last minutes say it to the step, and a record of each minute before."""
    dead = process(ProcessId(OWN.host, OWN.pid, OWN.birth + "0"))
    minute = Progress(4, "training", 60.0, 9.0, 100, 200, (), (), (), time=108.0)
    write(tmp_path, START, dead, step(1), json.loads(to_line(minute)))
    assert RunView(tmp_path).step == 4
    write_lanes(tmp_path, replace(snapshot(120.0), last=StepNumbers(7, 2.0, 1e-3, 1.0, 9.0, 1.0)), snapshot(121.0))
    view = RunView(tmp_path)
    ending = ending_of(view)
    assert ending is not None and (view.state, view.step, ending.lost) == ("dead", 7, 7)
    write(tmp_path, START | {"time": 300.0}, process(time=300.5))
    write(tmp_path, {"event": "resumed", "time": 301.0, "step": 2, "path": "c"})
    write_lanes(tmp_path, snapshot(302.0))
    again = RunView(tmp_path)
    view.refresh()
    for one in (view, again):
        assert one.log[2].text.startswith("the process before ended after step 7 without a last record, last seen ")
        assert (one.step, len(one.recent)) == (2, 1)
    assert view.log[2] == again.log[2]


def test_the_end_of_a_run_says_how_the_loss_changed(tmp_path):
    losses = [4.0 - n / 1000 for n in range(60)]
    write(tmp_path, START, process(), *(step(n, loss) for n, loss in enumerate(losses, 1)))
    write(tmp_path, {"event": "finished", "time": 500.0, "step": 60})
    finished, hint = list(RunView(tmp_path).log)[-2:]
    assert finished.text == "finished after 60 steps: median loss 3.9980 -> 3.9465 (-1.3%)"
    assert "learning_rate" in hint.text and hint.kind == "warning"


def test_a_run_whose_process_is_gone_is_dead(tmp_path):
    write(tmp_path, START, process(ProcessId(OWN.host, OWN.pid, OWN.birth + "0")), step(1))
    view = RunView(tmp_path)
    assert view.state == "dead" and view.ended and view.eta is None
    write(tmp_path, {**START, "time": 200.0}, process())
    view.refresh()
    assert view.state == "loading"


def test_a_child_that_ended_is_gone_before_its_parent_asks():
    child = os.fork()
    if child == 0:
        time.sleep(60)
    identity = ProcessId.of(child)
    assert identity.alive
    os.kill(child, 9)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not identity.alive
    os.waitpid(child, 0)
    assert not identity.alive


@pytest.mark.parametrize(("age", "state"), [(5.0, "saving"), (3600.0, "dead")])
def test_a_run_on_another_machine_lives_while_it_tells_something(tmp_path, age, state):
    write(tmp_path, START, process(ProcessId("elsewhere", 1, "x")))
    write_lanes(tmp_path, snapshot(time.time() - age, phase="saving"))
    assert RunView(tmp_path).state == state


def test_lanes_are_averaged_over_the_last_seconds(tmp_path):
    write(tmp_path, START, process(), step(1))
    lane = LaneRecord("cpu:0", "computing", stage="F0-1", kind="F", busy={"F": 0.1, "B": 0.1}, up=50, down=25)
    write_lanes(tmp_path, *(snapshot(150 + n / 4, lane) for n in range(40)))
    view = RunView(tmp_path)
    (shown,) = view.lanes
    assert shown.now == lane and shown.limit == 7
    assert shown.busy == pytest.approx({"F": 0.4, "B": 0.4}) and list(shown.busy) == ["F", "B"]
    assert (shown.up, shown.down) == pytest.approx((200.0, 100.0))
    assert view.bubble == pytest.approx(0.2)
    assert view.optimizer == OptimizerState("waiting", 1, 0.5)
    write(tmp_path, {"event": "finished", "time": 170.0, "step": 10})
    view.refresh()
    assert view.lanes == () and view.now is None and len(view.recent) == 40


def test_snapshots_of_an_earlier_process_are_passed_over(tmp_path):
    write(tmp_path, START, process())
    write_lanes(tmp_path, snapshot(99.0, phase="saving"))
    view = RunView(tmp_path)
    assert view.now is None and view.state == "loading"


def test_snapshots_come_back_as_they_were():
    lane = LaneRecord("cuda:0", "waiting", "FB3-4", "FB", 2, 1, 7, "weights", {"FB": 0.5}, 5, 6, 70, 80, 90)
    shot = snapshot(1.5, lane, LaneRecord("cuda:1", "idle"))
    assert Snapshot.from_line(shot.to_line()) == shot
    for line in ("", "[]", "{}", '{"schema":2}', shot.to_line()[:-5], shot.to_line().replace("phase", "fase")):
        assert Snapshot.from_line(line) is None


def test_peaks_and_ends_stay_in_what_is_plotted(tmp_path):
    losses: list[float | None] = [1.0 + number % 7 for number in range(5000)]
    losses[1234], losses[4321], losses[7] = 50.0, -50.0, None
    write(tmp_path, START, process(), *(step(n + 1, loss) for n, loss in enumerate(losses)))
    view = RunView(tmp_path)
    steps, values = view.steps.points("loss", 100)
    assert 90 <= len(steps) <= 100 and steps == sorted(set(steps))
    assert {50.0, -50.0} <= set(values) and nan not in values
    assert steps[values.index(50.0)] == 1235
    assert (steps[0], steps[-1]) == (1, 5000)


@pytest.mark.parametrize(
    "record",
    [
        {"event": "step", "time": 1.0},
        {**step(2), "step": "two"},
        {**step(2), "loss": "low"},
        {**step(2), "time": "late"},
        {"event": "run_started", "time": 1.0},
        {"event": "process_started", "time": None},
    ],
    ids=["step-missing", "step-text", "loss-text", "time-text", "run-fields-missing", "process-time-none"],
)
def test_records_that_do_not_fit_are_passed_over(tmp_path, record):
    write(tmp_path, START, process(), step(1), record, step(3))
    view = RunView(tmp_path)
    assert view.step == 3 and view.state == "training"


def test_missing_fields_have_their_defaults(tmp_path):
    record = step(2)
    del record["skipped"]
    score = {"event": "evaluation", "time": 104.0, "step": 2, "name": "tasks", "score": 0.5}
    write(tmp_path, START, process(), step(1), record, score)
    view = RunView(tmp_path)
    assert view.step == 2 and view.results.scores[-1].score == 0.5
    assert not any("cannot be read" in line.text for line in view.log)


ODD = (None, -1, 10**400, 1e300, 1e12, float("inf"), "", "\ud800", True, [], [1], [["a"]], {"a": 1})
RECORDS = {
    record["event"]: record
    for record in (
        START,
        process(),
        {"event": "estimated", "time": 101.0, "step_seconds": 1.0, "bubble": 0.1, "floor_seconds": 0.5},
        step(2),
        {"event": "sample", "time": 104.0, "step": 2, "prompt": "p", "text": "t"},
        {"event": "evaluation", "time": 104.0, "step": 2, "name": "tasks", "score": 0.5, "tasks": {"a": 0.5}},
        {"event": "checkpoint_saved", "time": 104.0, "step": 2, "path": "c"},
        {"event": "step_skipped", "time": 104.0, "step": 2, "rows": [3], "texts": ["x"]},
        {"event": "stalled", "time": 104.0, "step": 2, "seconds": 600.0, "path": "s", "waiting": {}},
    )
}


@pytest.mark.parametrize("event", RECORDS)
def test_a_value_of_another_type_breaks_nothing_that_is_shown(tmp_path, event):
    """Each field of a record holds each of many odd values in turn."""
    whole = RECORDS[event]
    write(tmp_path, START, process(), step(1))
    lane = LaneRecord("cpu:0", "computing", "F0-3", "F", 0, 0, 1, None, {"F": 0.1}, 10, 20)
    write_lanes(tmp_path, snapshot(150.0, lane))
    parts = [{**whole, field: odd} for field in whole for odd in ODD]
    parts += [{**whole, "memory": [{**place, name: odd}]} for place in MEMORY[:1] for name in place for odd in ODD]
    view = RunView(tmp_path)
    for record in parts:
        view.take(record)
        shown = summarize(view)
        assert (
            shown.state in (*ENDED, "training", "loading")
            and f"{shown.step:,}"
            and Layout.of(150, 20).row(shown, Mark())
        )
        assert isinstance(view.log[-1].text, str) and 0 <= view.log[-1].time < 1e11
        assert all(place.total + (place.limit or 0) >= -1 for place in view.places)
        assert view.eta is None or view.eta < 1e300
        assert view.share_of_floor is None or isinstance(view.share_of_floor, float)


@pytest.mark.parametrize("field", [field.name for field in fields(LaneRecord)] + ["time", "seconds", "process", "free"])
def test_a_snapshot_of_other_types_is_passed_over(tmp_path, field):
    write(tmp_path, START, process())
    lane = LaneRecord("cpu:0", "computing", "F0-3", "F", 0, 0, 1, "x", {"F": 0.1}, 10, 20, 5, 50, 60, 70.5)
    record = json.loads(snapshot(150.0, lane).to_line())
    place = record["lanes"][0] if field in record["lanes"][0] else record
    good, line = place[field], json.dumps
    for odd in (10**400, float("nan"), [1], {"a": "b"}):
        place[field] = odd
        assert Snapshot.from_line(line(record)) is None, odd
    place[field] = good
    assert Snapshot.from_line(line(record)) is not None


def test_what_went_wrong_is_in_the_log(tmp_path):
    write(tmp_path, START, process(), step(1))
    write(
        tmp_path,
        {"event": "stalled", "time": 700.0, "step": 1, "seconds": 600.0, "path": "stalled-1.txt", "waiting": {}},
        {"event": "checkpoint_damaged", "time": 701.0, "path": "c", "message": "c is torn"},
        {"event": "step_skipped", "time": 702.0, "step": 2, "rows": list(range(9)), "texts": []},
    )
    assert [(line.text, line.kind) for line in RunView(tmp_path).log][-3:] == [
        ("no progress for 600 s while training: stalled-1.txt says what everything waits for", "warning"),
        ("c is torn: using another checkpoint", "warning"),
        ("step 2: skipped, the loss is NaN in packed sequences 0, 1, 2, 3, 4, 5, 6, 7 …", "warning"),
    ]


def test_deep_lines_are_passed_over(tmp_path):
    write(tmp_path, START, process(), step(1))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert RunView(tmp_path).step == 1


def test_a_resumed_run_that_goes_on_is_found_in_a_file_that_is_read_in_part(tmp_path):
    """Its newest process stands in the midst of the file, between the pieces that are looked at."""
    gone = ProcessId(OWN.host, OWN.pid, "another")
    write(tmp_path, START, process(gone), *(step(number) for number in range(1, 3000)))
    write(tmp_path, START | {"time": 7000.0}, process(time=7001.0))
    write(tmp_path, {"event": "resumed", "time": 7002.0, "step": 2900, "path": "x"})
    write(tmp_path, *(step(number) for number in range(2901, 6001)))
    view = RunView(tmp_path, large=1 << 16)
    assert view.state == "training" and view.step == 6000 and view.taken_up == 7000.0
    assert view.progress.seconds_per_step == 2.0


def test_what_is_read_in_another_thread_changes_nothing_until_it_is_added(tmp_path):
    write(tmp_path, START, process(), step(1))
    view = RunView(tmp_path)
    write(tmp_path, step(2), {"event": "finished", "time": 170.0, "step": 2})
    write_lanes(tmp_path, snapshot(150.0, LaneRecord("cpu:0", "idle")))
    news = view.news()
    assert news and view.step == 1 and view.state == "training" and view.now is None
    assert view.add(news) and view.step == 2 and view.state == "finished" and len(view.recent) == 1
    assert not view.add(view.news())


def test_a_record_that_is_too_long_is_passed_over_and_a_long_message_is_cut(tmp_path):
    write(tmp_path, START, process(), step(1) | {"more": "x" * (1 << 20)})
    write(tmp_path, {"event": "save_failed", "time": 101.0, "step": 1, "message": "y" * 5000})
    view = RunView(tmp_path)
    assert view.step == 0 and len(view.log[-1].text) < 2100


def test_a_snapshot_without_its_time_is_passed_over(tmp_path):
    write(tmp_path, START, process())
    (tmp_path / FILE).write_text(snapshot(150.0).to_line().replace("150.0", "null") + "\n")
    assert RunView(tmp_path).now is None
