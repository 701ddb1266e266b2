"""Run: what it shows of a run that goes on, that ended, and that is played again; and the commands it gives."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import MouseScrollDown
from textual.widgets import Button
from textual.widgets._toast import Toast

from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.view.run_view import RunView
from rptrain.runs.view.values import Checkpoint
from rptrain.tui.app import RptrainApp
from rptrain.tui.run.lanes import Lanes
from rptrain.tui.run.log_panel import LogPanel
from rptrain.tui.run.replay import Replay
from rptrain.tui.run.run_head import RunHead
from rptrain.tui.run.screen import PAUSE, RunScreen
from rptrain.tui.services import launch
from rptrain.tui.widgets.key_bar import KeyBar
from rptrain.tui.widgets.plot import POINTS, Plot
from rptrain.tui.widgets.top_bar import TopBar

from ..run_tools import PATIENCE
from .conftest import (
    Made,
    Page,
    driven,
    notified,
    press_until,
    screen_text,
    settled,
    type_over,
    until,
    wait_for,
    widget_text,
)
from .recorded import BEGAN, make_run, snapshot

pytestmark = pytest.mark.long


async def opened(pilot) -> RunScreen:
    screen = pilot.app.screen
    await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen) and "loss" in screen_text(pilot.app))
    await until(pilot, lambda: pilot.app.screen.state != "new")
    await settled(pilot)
    return pilot.app.screen if isinstance(pilot.app.screen, RunScreen) else screen


@driven
async def test_a_run_that_goes_on(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs")
    async with make(attach=run).run_test(size=(120, 36)) as pilot:
        await opened(pilot)
        text = screen_text(pilot.app)
        assert "llama  ▶ training" in text and "400/1,000" in text and "20 m 00 s left" in text
        assert "of peak speed" in text and "bubble" in text and "gradient norm" in text
        assert "118 GiB of 192 GiB" in text and "optimizer state" in text and "one step late" in text
        assert "queue 1" in text and "1.41 s per step" in text and "step 400: saved" in text
        lanes = widget_text(pilot.app.screen.query_one(Lanes)).splitlines()
        assert lanes[1].startswith("cuda:0") and "waits: weights" in lanes[1] and "18.2/24.0 GiB" in lanes[2]
        assert "↑ 11.5 GiB/s" in lanes[2] and "61 °C" in lanes[2] and "used 97 %" in lanes[2]
        assert {"▀", "█", "▄", "·"} <= set(lanes[3]) and "FB8-28 · 16" in lanes[3]


@driven
async def test_the_best_validation_loss_is_in_the_head_the_log_and_the_list(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=30)
    with (run / "events.jsonl").open("a") as file:
        for step, loss in ((10, 2.5), (20, 1.1335), (30, 1.25)):
            score = {"event": "evaluation", "time": BEGAN + 101, "step": step, "name": "loss", "score": loss}
            file.write(json.dumps(score) + "\n")
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        assert "1.1335 best validation, step 20" in screen_text(pilot.app).splitlines()[2]
        await press_until(pilot, "slash", lambda: pilot.app.focused is pilot.app.screen.query_one("#log-search"))
        await pilot.press(*"best")
        await until(pilot, lambda: "2 of 6 lines have" in screen_text(pilot.app))
        assert "step 20: validation loss 1.1335, the best so far" in screen_text(pilot.app)
        await pilot.press("escape", "escape")
        await until(pilot, lambda: "best val." in screen_text(pilot.app))
        assert "  1.1335 " in next(
            line for line in screen_text(pilot.app).splitlines() if line.strip().startswith("llama")
        )


@driven
async def test_what_the_trainer_writes_appears(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=10)
    async with make(attach=run).run_test(size=(120, 36)) as pilot:
        await opened(pilot)
        record = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(record | {"step": 11, "loss": 77.7}) + "\n")
        with (run / "lanes.jsonl").open("a") as file:
            file.write(snapshot(("cuda:0",), record["time"] + 9, 0).to_line() + "\n")
        await until(pilot, lambda: "77.700 loss" in screen_text(pilot.app) and "11/1,000" in screen_text(pilot.app))
        await until(pilot, lambda: "cuda:3" not in widget_text(pilot.app.screen.query_one(Lanes)))
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"schema": 1, "event": "finished", "time": 1.7e9 + 300, "step": 11}) + "\n")
        await until(pilot, lambda: "✓ finished" in screen_text(pilot.app))
        await until(pilot, lambda: " save " not in screen_text(pilot.app).splitlines()[-1])


@driven
async def test_nothing_moves_where_names_are_long_and_devices_come_and_go(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", "a-name-of-sixty-letters-" + "x" * 36, devices=2)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        head = screen_text(pilot.app).splitlines()[1]
        assert "a-name-of-sixty" in head and "…  ▶ training " in head and head.endswith("400/1,000  20 m 00 s left")
        bar = head.index("━")
        lanes = pilot.app.screen.query_one(Lanes)
        assert lanes.size.height == 3
        asleep = replace(snapshot((), 1_700_000_900.0, 0), phase="saving")
        with (run / "lanes.jsonl").open("a") as file:
            file.write(asleep.to_line() + "\n")
        await until(pilot, lambda: "the state is being saved" in widget_text(lanes))
        assert (await settled(pilot)).splitlines()[1].index("━") == bar and lanes.size.height == 3


@driven
async def test_what_there_is_no_room_for_is_reached_by_scrolling(make: Made, tmp_path: Path):
    """Of eight devices at 80 × 24 all are seen, and of the host how much it takes; by keys all else."""
    run = make_run(tmp_path / "runs", devices=8)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        app.animation_level = "none"
        await opened(pilot)
        await until(pilot, lambda: "step 400: saved" in screen_text(app) and "space pause" in screen_text(app))
        text = await settled(pilot)
        assert all(f"cuda:{number} " in text for number in range(8)) and "118 GiB of 192 GiB" in text
        assert " space pause" in text.splitlines()[-1] and "Planned, by use" not in text
        assert app.focused is not None and app.focused.id == "log-body"
        await press_until(pilot, "shift+tab", lambda: app.focused is not None and app.focused.id == "memory")
        await press_until(pilot, "end", lambda: "Planned, by use" in screen_text(app))
        assert "118 GiB of" not in await settled(pilot)


@driven
async def test_sixteen_devices_leave_room_for_all_else(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", devices=16)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        app.animation_level = "none"
        await opened(pilot)
        await until(pilot, lambda: "step 400: saved" in screen_text(app))
        text = await settled(pilot)
        assert "118 GiB of 192 GiB" in text and "cuda:9 " not in text
        await press_until(pilot, "tab", lambda: app.focused is not None and app.focused.id == "devices")
        await press_until(pilot, "end", lambda: "cuda:15 " in screen_text(app))
        text = await settled(pilot)
        assert "step 400: saved" in text and "cuda:0 " not in text


@driven
async def test_a_long_run_is_followed_while_all_of_it_is_read(make: Made, tmp_path: Path, monkeypatch):
    run, read = make_run(tmp_path / "runs", steps=200), threading.Event()

    class Slow(RunView):
        def __init__(self, path: Path, **named: int) -> None:
            assert named or read.wait(PATIENCE)
            super().__init__(path, **named)

    monkeypatch.setattr("rptrain.tui.run.screen.AT_FIRST", 8192)
    monkeypatch.setattr("rptrain.tui.run.screen.RunView", Slow)
    async with make(attach=run).run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot)
        assert screen._view is not None and not screen._view.whole
        record = json.loads((run / "events.jsonl").read_text().splitlines()[-3])
        for step, loss in ((201, 77.5), (202, 88.5)):
            with (run / "events.jsonl").open("a") as file:
                file.write(json.dumps(record | {"event": "step", "step": step, "loss": loss}) + "\n")
            await until(pilot, lambda loss=loss: f"{loss:.3f} loss" in screen_text(pilot.app))
            read.set()
            await until(pilot, lambda step=step: step == 201 or (screen._view is not None and screen._view.whole))


@driven
async def test_commands_are_files_and_stopping_is_asked_twice(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs")
    control = run / "control"
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await press_until(pilot, "space", (control / "PAUSE").exists)
        await until(pilot, lambda: "pause asked" in screen_text(pilot.app) and "continue" in screen_text(pilot.app))
        await press_until(pilot, "p", lambda: not (control / "PAUSE").exists())
        await press_until(pilot, "s", (control / "SAVE").exists)
        await press_until(pilot, "x", lambda: "Stop llama?" in screen_text(pilot.app))
        await until(pilot, lambda: isinstance(pilot.app.focused, Button))
        await until(pilot, lambda: "▸ Stop (y)" in screen_text(pilot.app))
        await press_until(pilot, "left", lambda: "▸ No (n)" in screen_text(pilot.app))
        assert "▸ Stop" not in screen_text(pilot.app), "only the answer that Enter gives is marked"
        await press_until(pilot, "escape", lambda: "Stop llama?" not in screen_text(pilot.app))
        assert not (control / "STOP").exists()
        await pilot.press("x")
        await until(pilot, lambda: "Stop llama?" in screen_text(pilot.app))
        await until(pilot, lambda: isinstance(pilot.app.focused, Button))
        await pilot.press("enter")  # it can be resumed: Enter agrees
        await until(pilot, (control / "STOP").exists)


@driven
async def test_a_run_that_ended_is_not_commanded_but_resumed(make: Made, tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "runs", end="failed")
    saved = run / "checkpoints" / "checkpoint-15"
    saved.mkdir()
    (saved / MANIFEST).touch()
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", 'echo "$@" > said', "trainer"))
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "✗ failed" in screen_text(pilot.app))
        await until(pilot, lambda: "fell off the bus" in screen_text(pilot.app))
        await pilot.press("space", "s", "x")
        await settled(pilot)
        assert not (run / "control").exists()
        await pilot.press("r")
        await until(pilot, lambda: (tmp_path / "said").exists() and (tmp_path / "said").read_text() != "")
    assert (tmp_path / "said").read_text() == f'--config {run}/config.toml save.resume="{run}"\n'


@driven
async def test_the_head_of_a_resumed_run_fits_into_60_columns(tmp_path: Path):
    view = RunView(make_run(tmp_path, steps=2, end="stopped", alive=False))
    view.results.checkpoints.append(Checkpoint(BEGAN, 1_000_000, "checkpoints/checkpoint-1000000"))
    head = RunHead()
    async with Page(head).run_test(size=(58, 4)) as pilot:  # without the padding
        head.show(view, "starting")
        await pilot.pause()
        assert widget_text(head).splitlines()[1] == "resumes from step 1,000,000; numbers after its first steps"


@driven
async def test_a_notice_covers_neither_the_head_nor_the_log_nor_the_keys(make: Made, tmp_path: Path):
    async with make(attach=make_run(tmp_path / "runs")).run_test(size=(80, 24), notifications=True) as pilot:
        screen = await opened(pilot)
        pilot.app.notify("saving after this step " * 4, timeout=PATIENCE)
        await until(pilot, lambda: bool(screen.query(Toast)) and screen.query_one(Toast).region.height > 1)
        covered = screen.query_one(Toast).region
        assert not any(covered.overlaps(screen.query_one(part).region) for part in (TopBar, RunHead, LogPanel, KeyBar))


@driven
async def test_why_a_trainer_did_not_begin_is_shown(make: Made, tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "runs", end="stopped", alive=False)
    (run / launch.LOG).write_text("of the first time\n")
    script = "echo begun >> begun; while ! test -e go; do sleep 0.1; done; rm go; echo no such model; exit 2"
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", script, "trainer"))
    app = make(attach=run)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        screen = await opened(pilot)
        assert "■ stopped" in screen_text(app) and "r resumes from step " in screen_text(app)
        await pilot.press("r")
        await until(pilot, lambda: "the trainer is starting" in screen_text(app))
        await until(pilot, lambda: "… starting" in screen_text(app) and "■ stopped" not in screen_text(app))
        await until(pilot, lambda: "resumes from step 400; numbers after its first steps" in screen_text(app))
        assert "took" not in screen_text(app) and "of peak speed" not in screen_text(app), (
            "numbers of the process before"
        )
        screen.action_resume()  # the key itself does nothing now
        await until(pilot, lambda: "is already starting" in notified(app))
        Path("go").touch()
        await until(pilot, lambda: "training failed to start: see below" in screen_text(app))
        await until(
            pilot, lambda: "no such model" in screen_text(app) and "trainer failed to start" in screen_text(app)
        )
        assert "of the first time" not in screen_text(app)
        await pilot.press("r")
        await until(pilot, lambda: Path("begun").read_text() == "begun\n" * 2)
        with (run / "events.jsonl").open("a") as file:
            for line in (run / "events.jsonl").read_text().splitlines()[:2]:
                file.write(json.dumps(json.loads(line) | {"time": time.time()}) + "\n")
        await until(pilot, lambda: "llama-3.1-8b on cuda:0" in screen_text(app))
        Path("go").touch()


@driven
async def test_a_run_tells_of_itself_once_it_has_begun(make: Made, tmp_path: Path):
    """Until then what its trainer prints is shown."""
    run = make_run(tmp_path / "runs", steps=3)
    told = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text("")
    (tmp_path / "runs" / ".llama.rptrain-log").write_text("the weights are read\n")
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "the weights are read" in screen_text(pilot.app))
        (run / "events.jsonl").write_text(told)
        await until(pilot, lambda: "llama-3.1-8b on cuda:0" in screen_text(pilot.app))


@driven
async def test_a_run_that_another_process_trains_is_not_resumed(make: Made, tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "runs", end="stopped", alive=False)
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "touch begun"))
    app = make(attach=run)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await opened(pilot)
        with EventLog(run / "events.jsonl"):
            await pilot.press("r")
            await until(pilot, lambda: "another process is training this run" in notified(app))
    assert not Path("begun").exists()


@driven
async def test_a_command_that_cannot_be_taken_back_is_told(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", "[red]llama")
    (run / "control" / "PAUSE").mkdir(parents=True)
    async with make(attach=run).run_test(size=(120, 24), notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("space")
        await until(pilot, lambda: "pause cannot be withdrawn" in notified(pilot.app))
        assert "[red]llama  ▶" in screen_text(pilot.app).splitlines()[1]
        pilot.app.screen.notify("a [red]name[/] of [/]")
        await until(pilot, lambda: "a [red]name[/] of [/]" in screen_text(pilot.app))


@driven
async def test_an_export_is_a_process_of_its_own(make: Made, tmp_path: Path, monkeypatch):
    """Nothing that is done here ends it, and how it ended is told on any screen."""
    run = make_run(tmp_path / "runs", end="finished")
    script = (
        'echo "$@" > said; while ! test -e go; do sleep 0.1; done; mv go gone; echo "no [room] left"; exit $(cat gone)'
    )
    monkeypatch.setattr(launch, "EXPORT", ("sh", "-c", script, "export"))

    def end(code: str) -> None:
        """The script may find the file as soon as there is one, so it has its content by then."""
        Path("code").write_text(code)
        Path("code").rename("go")

    app = make(attach=run)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("e")
        await until(pilot, lambda: "Export llama" in screen_text(app))
        await type_over(pilot, "~nosuchuser/out")
        await press_until(pilot, "enter", lambda: 'the user "nosuchuser" does not exist' in notified(app))
        await type_over(pilot, "out")
        await press_until(pilot, "enter", lambda: "exporting to out" in screen_text(app))
        await until(pilot, lambda: Path("said").exists() and Path("said").read_text() == f"{run} --to out --json\n")
        await press_until(pilot, "escape", lambda: isinstance(app.screen, RunScreen))
        await pilot.press("e")
        await until(pilot, lambda: "Export llama" in screen_text(app))
        await type_over(pilot, "out")
        await press_until(pilot, "enter", lambda: "an export to out is running" in screen_text(app))
        app._shared.helper.close()
        await pilot.press("f2")
        end("1")
        await until(pilot, lambda: "no [room] left" in screen_text(app) and "see .out.rptrain-log" in screen_text(app))
        await press_until(pilot, "f3", lambda: "finished" in screen_text(app))
        await press_until(pilot, "e", lambda: "Export llama" in screen_text(app))
        await press_until(pilot, "escape", lambda: "Export llama" not in screen_text(app))
        await press_until(pilot, "e", lambda: "Export llama" in screen_text(app))
        await type_over(pilot, "second")
        await press_until(pilot, "enter", Path(".second.rptrain-log").exists)
    end("0")
    await wait_for(lambda: Path(".second.rptrain-log").read_text() == "no [room] left\n")  # the interface is gone


@driven
async def test_a_replay_goes_from_the_beginning_to_the_end(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=100, total=100, end="finished", alive=False)
    async with make(attach=run).run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot)
        await pilot.press("v")
        await until(pilot, lambda: "▷ replay" in screen_text(pilot.app))
        await until(pilot, lambda: "×16" in screen_text(pilot.app))  # 241 seconds in half a minute or less
        assert screen.query_one(Lanes).size.height == 1 + 4 * 2  # room for what will come
        await pilot.press("space")
        await until(pilot, lambda: "paused" in screen_text(pilot.app))
        early = await settled(pilot)  # with what was under way
        assert "100/100" not in early
        await pilot.pause(2 * PAUSE)
        assert screen_text(pilot.app) == early
        await pilot.press("plus")
        await until(pilot, lambda: "×32, paused" in screen_text(pilot.app))
        await pilot.press("minus", "minus")
        await until(pilot, lambda: "×8, paused" in screen_text(pilot.app))
        before, span = screen._replay.clock, screen._replay.end - screen._replay.began
        for key, by in (("right", span / 20), ("left", 0), ("shift+right", 60), ("right", 60 + span / 20)):
            await press_until(pilot, key, lambda by=by: abs(screen._replay.clock - before - by) < 1)
        assert screen._replay.view.step == int((screen._replay.clock - BEGAN - 40) // 2)
        await press_until(pilot, "l", lambda: "← → seek" in screen_text(pilot.app))
        await pilot.press("escape")
        await until(pilot, lambda: "← → seek" not in screen_text(pilot.app))
        await pilot.press("space", "+", "+", "plus", "plus", "plus", "plus", "plus", "plus")
        await until(pilot, lambda: "100/100" in screen_text(pilot.app))
        await pilot.press("escape")
        await until(pilot, lambda: screen.state == "finished" and "✓ finished" in screen_text(pilot.app))


@driven
async def test_each_of_several_quick_keys_moves_a_replay(make: Made, tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "runs", steps=300, total=300, end="finished", alive=False)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        await pilot.press("v", "space")
        await until(pilot, lambda: "paused" in screen_text(pilot.app))
        before, move = screen._replay.clock, Replay.at
        go = threading.Event()
        monkeypatch.setattr(Replay, "at", lambda *given: go.wait(PATIENCE) and move(*given))
        for _ in range(3):
            screen.action_sideways(10)
            await pilot.pause()
        go.set()
        await until(pilot, lambda: screen._target is None)
        assert abs(screen._replay.clock - before - 180) < 1


def test_a_replay_skips_the_time_without_a_process(tmp_path: Path):
    run = make_run(tmp_path, steps=5, every=0.5)
    again = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    with (run / "events.jsonl").open("a") as file:
        for record in again:
            file.write(json.dumps(record | {"time": record["time"] + 300}) + "\n")
    (run / "lanes.jsonl").unlink()
    replay = Replay(run)
    assert replay.speed == 4, "84 seconds of training in half a minute or less"
    replay.speed, seconds = 1, 0
    while not replay.done:
        replay.add(replay.news(1.0))
        seconds += 1
    assert 2 * 42 < seconds < 100
    assert [line.text for line in replay.view.log if line.text.startswith("replay")] == [
        "replay: 4 m 16 s without records skipped"
    ]
    assert abs(Replay.at(run, BEGAN + 100, 1).clock - BEGAN - 100) < 1, "a key leads into this time"


@driven
async def test_the_log_stays_in_sight_while_a_run_is_resumed(make: Made, tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "runs", end="stopped", alive=False)
    script = "echo begun >> begun; while ! test -e go; do sleep 0.1; done; echo no such model; exit 2"
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", script, "trainer"))
    async with make(attach=run).run_test(size=(120, 36)) as pilot:
        await opened(pilot)
        await pilot.press("r")
        await until(pilot, lambda: "… starting" in screen_text(pilot.app))
        await settled(pilot)
        assert "saved checkpoints/checkpoint-400" in screen_text(pilot.app)
        (tmp_path / "go").touch()
        await until(pilot, lambda: "no such model" in widget_text(pilot.app.screen.query_one("#log-text")))


@driven
async def test_an_equal_notice_is_shown_once(make: Made, tmp_path: Path):
    async with make(attach=make_run(tmp_path / "runs")).run_test(size=(80, 24), notifications=True) as pilot:
        screen = await opened(pilot)
        for text in ("one", "two", "one", "one"):
            pilot.app.notify(text, timeout=PATIENCE)
        await until(pilot, lambda: len(screen.query(Toast)) == 2)
        await settled(pilot)
        assert len(screen.query(Toast)) == 2


@driven
async def test_the_pane_with_the_focus_is_marked_without_color(make: Made, tmp_path: Path):
    async with make(attach=make_run(tmp_path / "runs")).run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        panes, seen = {"devices": "devices", "memory": "memory", "log-body": "log"}, set[str]()
        for _ in panes:
            await pilot.press("tab")
            await settled(pilot)
            focused = screen.focused.id
            heavy = [id for id in panes.values() if "heavy" in str(screen.query_one(f"#{id}").styles.border)]
            assert heavy == [panes[focused]]
            seen.add(focused)
        assert seen == set(panes)


@driven
async def test_the_mouse_does_what_keys_do(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", devices=8)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        app.animation_level = "none"
        await opened(pilot)
        await until(pilot, lambda: "v replay" in screen_text(app))
        footer = (await settled(pilot)).splitlines()[-1]
        await pilot.click(offset=(footer.index("s save"), 23))
        await until(pilot, (run / "control" / "SAVE").exists)
        await settled(pilot)
        await pilot.click(offset=(footer.index("x stop"), 23))
        await until(pilot, lambda: "Stop llama?" in screen_text(app))
        await pilot.click("#no")
        await until(pilot, lambda: "Stop llama?" not in screen_text(app))
        memory = app.screen.query_one("#memory")
        memory.post_message(MouseScrollDown(memory, 5, 1, 0, 1, 0, False, False, False))
        await until(pilot, lambda: memory.scroll_y > 0)
        assert not (run / "control" / "STOP").exists()


@driven
async def test_curves_and_parts_of_the_log_are_turned_by_keys(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs")
    (run / "trainer.log").write_text("loading\r 50 %\r100 %\n" + "a line\n" * 50)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)

        def drawn() -> list[str | None]:
            return [plot.id for plot in screen.query(Plot) if plot.display]

        assert drawn() == ["loss"]
        for wanted in ("loss", "learning-rate", "grad-norm", "busy", "vram", "host", "loss"):
            await pilot.press("l")
            await until(pilot, lambda wanted=wanted: drawn() == [wanted])
            await settled(pilot)
        panel = screen.query_one(LogPanel)
        await press_until(pilot, "o", lambda: panel.part == "output" and "a line" in screen_text(pilot.app))
        await press_until(pilot, "g", lambda: "100 %" in screen_text(pilot.app))
        assert "50 %" not in screen_text(pilot.app)
        await pilot.press("j", "G", "k", "o")
        await until(pilot, lambda: "step 200  Spell backwards: abc  cba" in screen_text(pilot.app))
        assert panel.part == "samples"
        await press_until(pilot, "o", lambda: panel.part == "log")


@driven
async def test_100_000_steps_open_at_once_and_a_large_output_does_not_matter(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=100_000, total=200_000, every=0.1)
    with (run / "trainer.log").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(b"\nthe end\n")
    app: RptrainApp = make(attach=run)
    async with app.run_test(size=(120, 36)) as pilot:
        await opened(pilot)
        assert "100,000/200,000" in screen_text(app)
        plot = app.screen.query_one("#loss", Plot)
        xs, ys = RunView(run).steps.points("loss", POINTS)
        await until(pilot, lambda: (plot.curves[0].xs, plot.curves[0].ys) == (xs, ys))  # after those of a sample
        curve = plot.curves[0]
        assert 100 < len(curve.xs) <= POINTS + 1 and curve.xs[0] < 1000 and curve.xs[-1] == 100_000
        gaps = [after - before for before, after in zip(curve.xs, curve.xs[1:], strict=False)]
        assert max(gaps) < 5000  # from end to end
        await pilot.press("o")
        await until(pilot, lambda: "the end" in screen_text(app))


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
@driven
async def test_how_a_run_ended(make: Made, tmp_path: Path, state: str):
    run = make_run(tmp_path / "runs", steps=20, end=state)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        assert f" {state} " in screen_text(pilot.app).splitlines()[1]


@driven
async def test_a_run_whose_process_is_gone_is_dead(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=20, alive=False)
    saved = run / "checkpoints" / "checkpoint-15"
    saved.mkdir()
    (saved / MANIFEST).touch()
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "r resume" in screen_text(pilot.app))
        text = await settled(pilot)
        assert "✗ dead" in text and "Devices (last known)" in text and "x stop" not in text
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, RunScreen))
