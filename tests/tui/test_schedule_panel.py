"""The schedule of a step: its strips, and the panel in runs that are trained, ended, old and played again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rptrain.runs.records.timeline import SlotSpan, StepTimeline
from rptrain.runs.view.run_view import RunView
from rptrain.tui.run.lanes import Lanes
from rptrain.tui.run.log_panel import LogPanel
from rptrain.tui.run.schedule_panel import ProcessSchedule, SchedulePanel, part_lines, strip_of
from rptrain.tui.run.screen import RunScreen

from .conftest import Made, driven, press_until, screen_text, until, widget_text
from .recorded import make_run

STAGES = ("F0-3", "FB4-5", "B2-3", "B0-1")


@pytest.mark.parametrize(
    ("lane", "drawn"),
    [
        ([(0, 0, 3), (1, 3, 8), (3, 9, 10)], "1▀▀2████·▄"),
        ([(4, 0, 4), (5, 4, 7), (6, 7, 9.8)], "1▀▀▀2██3▄▄"),  # of the second round
        ([(0, 0, 0.2), (1, 0.2, 0.7), (2, 1.2, 1.6)], "█·········"),  # less than half of a character
        ([(2, 0, 2), (2, 4, 10)], "3▄··3▄▄▄▄▄"),
        ([(0, -5, 2), (1, 8, 99)], "1▀······2█"),  # another program wrote it
        ([], "··········"),
    ],
)
def test_a_strip_shows_stages_and_idle_time(lane: list[tuple[int, float, float]], drawn: str):
    strip = strip_of(tuple(SlotSpan(*one) for one in lane), 10.0, 10, STAGES)
    assert "".join(text for text, _ in strip) == drawn


def test_stages_of_two_digits_and_of_unknown_kinds():
    stages = (*(f"F{n}-{n}" for n in range(11)), "W0-1")
    strip = strip_of((SlotSpan(9, 0, 3), SlotSpan(10, 3, 5), SlotSpan(11, 5, 10)), 10.0, 10, stages)
    assert "".join(text for text, _ in strip) == "10▀▀▀12▒▒▒"
    assert strip_of((SlotSpan(3, 0, 10),), 10.0, 4, ()) == [("▒▒▒▒", "$foreground")]


def step(seconds: float, busy: float, *lanes: tuple[SlotSpan, ...], number: int | None = None) -> StepTimeline:
    return StepTimeline(0, seconds, (busy,) * len(lanes), lanes, number)


def test_planned_and_actual_share_the_time_axis():
    planned = step(1.0, 1.0, (SlotSpan(0, 0.0, 1.0),))
    actual = step(2.0, 0.75, (SlotSpan(0, 0.0, 1.5),), number=1234)
    part = ProcessSchedule("", ("cuda:0",), ("F0-3",), STAGES, planned, actual, 1.0)
    *summary, first, second, axis, stages = (line.plain for line in part_lines(part, 42))
    assert summary == ["planned: 1.00 s per step, 100% busy", "step 1,234: 2.00 s per step, 75% busy"]
    assert first == "cuda:0  planned 1▀▀▀▀▀▀▀▀▀··········  100%"
    assert second == "F0-3    actual  1▀▀▀▀▀▀▀▀▀▀▀▀▀▀·····   75%"
    assert axis == " " * 16 + "0 s       ▲   2.00 s"
    assert stages == "1 F0-3 · 2 FB4-5 · 3 B2-3 · 4 B0-1"


def test_an_average_that_is_much_longer_than_the_step_is_told():
    actual = step(0.0157, 0.75, (SlotSpan(0, 0.0, 0.01),), number=7)
    for pace, told in ((0.159, True), (0.02, False), (None, False)):
        part = ProcessSchedule("", ("cuda:0",), ("F0-3",), STAGES, None, actual, None, pace)
        text = " ".join(line.plain for line in part_lines(part, 100))
        assert ("with what is between steps, they take 159 ms on average" in text) == told


def test_a_pair_of_steps_is_named(tmp_path: Path):
    view = RunView(make_run(tmp_path / "runs", devices=1))
    assert view.timeline is not None
    view.progress.step_ended = view.recent[-1].time - 0.5
    assert ProcessSchedule.of(view, titled=False).elapsed == 0.5
    view.timeline = replace(view.timeline, steps=2, seconds=4.0)
    part = ProcessSchedule.of(view, titled=False)
    assert any("2.00 s per step" in line.plain and "(2 steps shown)" in line.plain for line in part_lines(part, 90))
    assert part.elapsed is None, "the window began a step earlier"


@pytest.mark.long
@pytest.mark.sample(2)
@pytest.mark.parametrize(("devices", "width"), [(1, 60), (2, 80), (8, 80)])
@driven
async def test_the_schedule_in_place_of_devices_and_curves(make: Made, tmp_path: Path, devices: int, width: int):
    run = make_run(tmp_path / "runs", devices=devices)
    async with make(attach=run).run_test(size=(width, 24)) as pilot:
        app, screen = pilot.app, pilot.app.screen
        await until(pilot, lambda: "400/1,000" in screen_text(app))
        await press_until(pilot, "t", lambda: "Schedule of a step" in screen_text(app))
        lines = screen_text(app).splitlines()
        (place,) = (number for number, line in enumerate(lines) if "planned: 1.85 s per step, 97% busy" in line)
        place += "step 400" not in lines[place]  # which has a line of its own where it is narrow
        rows = lines[place + 1 : place + 1 + 2 * devices]
        assert all("planned " in row and row.endswith("97%") for row in rows[::2])
        assert all("actual " in row and row.endswith("90%") for row in rows[1::2])
        assert all({"▀", "█", "▄"} <= set(row) for row in rows)
        assert not screen.query_one(Lanes).region and not screen.query_one(LogPanel).region
        await press_until(pilot, "escape", lambda: bool(screen.query_one(Lanes).region))
        assert isinstance(app.screen, RunScreen)
        await pilot.click(Lanes)
        await until(pilot, lambda: "Schedule of a step" in screen_text(app))
        await pilot.click(SchedulePanel)
        await until(pilot, lambda: bool(screen.query_one(Lanes).region))
        await press_until(pilot, "t", lambda: "Schedule of a step" in screen_text(app))
        await press_until(pilot, "slash", lambda: bool(screen.query_one("#log-search").region))


@pytest.mark.long
@driven
async def test_the_schedule_of_a_run_that_ended_and_of_its_replay(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rptrain.tui.run.replay.SHOWN_IN", 2.0)
    run = make_run(tmp_path / "runs", end="finished", alive=False, devices=2)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await until(pilot, lambda: "✓ finished" in screen_text(app))
        await press_until(pilot, "t", lambda: "step 400: 2.00 s per step, 90% busy" in screen_text(app))
        assert "▲" not in screen_text(app) and "waiting" not in screen_text(app)
        await press_until(pilot, "v", lambda: "▷ replay" in screen_text(app))
        await until(pilot, lambda: "no step is measured yet" in screen_text(app))
        await until(pilot, lambda: "step 400: 2.00 s" in screen_text(app))


@pytest.mark.long
@driven
async def test_processes_have_schedules_of_their_own(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", devices=1, processes=2)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "400/1,000" in screen_text(pilot.app))
        await press_until(pilot, "t", lambda: screen_text(pilot.app).count("planned: 1.85 s") == 2)
        text = screen_text(pilot.app)
        assert text.index("process 0 on node-0") < text.index("planned: 1.85") < text.index("process 1 on node-1")


@pytest.mark.long
@driven
async def test_a_run_of_an_earlier_version_has_no_schedule(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs")
    for name, key in (("events.jsonl", "schedule"), ("lanes.jsonl", "timeline")):
        records = [json.loads(line) for line in (run / name).read_text().splitlines()]
        lines = [json.dumps({name: value for name, value in one.items() if name != key}) for one in records]
        (run / name).write_text("\n".join(lines) + "\n")
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "400/1,000" in screen_text(pilot.app))
        await pilot.press("t")
        panel = pilot.app.screen.query_one(SchedulePanel)
        await until(pilot, lambda: "No schedule is recorded" in widget_text(panel))
