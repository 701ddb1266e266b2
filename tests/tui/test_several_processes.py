"""The Run and Runs screens with runs that several processes train."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rptrain.tui.run.lanes import Lanes
from rptrain.tui.run.replay import Replay
from rptrain.tui.run.screen import RunScreen

from .conftest import Made, driven, press_until, screen_text, settled, until, widget_text
from .recorded import make_run, snapshot

STEPS, EVERY = 50, 2.0


def make_two(folder: Path, name: str = "llama", devices: int = 2) -> Path:
    """A run that two processes train, on hosts that are not this one. Their last records are of later times, so that
    both count as alive however long a test takes.
    """
    began = time.time() - 40 - STEPS * EVERY
    run = make_run(folder, name, steps=STEPS, every=EVERY, devices=devices, began=began, processes=2)
    for process in (run, run / "processes" / "1"):
        append(process / "events.jsonl", {"event": "of_a_later_version", "time": time.time() + 3600})
    return run


def append(file: Path, *records: dict) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps({"schema": 1, **record}) + "\n" for record in records)


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
@driven
async def test_each_process_has_its_devices_below_its_host(make: Made, tmp_path: Path, size: tuple[int, int]):
    run = make_two(tmp_path / "runs")
    other = run / "processes" / "1"
    async with make(attach=run).run_test(size=size) as pilot:
        app = pilot.app
        app.animation_level = "none"
        await until(pilot, lambda: "process 1 on node-1" in screen_text(app))
        lanes = app.screen.query_one(Lanes)

        def names() -> list[str]:
            return [line.split(" ")[0] for line in widget_text(lanes).splitlines() if line[:1].strip()]

        assert names() == ["Devices", "process", "cuda:0", "cuda:1", "process", "cuda:0", "cuda:1"]
        assert "process 0 on node-0 · host memory 118 GiB of 192 GiB" in widget_text(lanes)
        height = lanes.size.height
        assert height == 7
        text = await settled(pilot)
        assert "Host 0" in text and "bubble" in text and f"{STEPS}/1,000" in text

        asleep = replace(snapshot((), time.time(), 0), phase="loading", process=1 << 30, free=3 << 30)
        append(other / "lanes.jsonl", json.loads(asleep.to_line()))
        await until(pilot, lambda: "the weights are being loaded" in widget_text(lanes))
        assert names() == ["Devices", "process", "cuda:0", "cuda:1", "process", "the"] and lanes.size.height == height
        assert "process 1 on node-1 · host memory 1.00 GiB of 4.00 GiB" in widget_text(lanes)

        message = "EngineError: out of memory " + "x" * 90
        append(other / "events.jsonl", {"event": "failed", "time": time.time(), "message": message})
        await until(pilot, lambda: "process 1 on node-1 · failed: EngineError" in widget_text(lanes))
        await until(pilot, lambda: "process 1 on node-1: EngineError" in screen_text(app))
        text = await settled(pilot)
        assert "▶ training" in text and all(len(line) <= size[0] for line in text.splitlines())


@pytest.mark.long
@driven
async def test_a_process_that_is_gone_is_dead(make: Made, tmp_path: Path):
    run = make_two(tmp_path / "runs")
    other = run / "processes" / "1"
    lines = (other / "events.jsonl").read_text().splitlines()
    (other / "events.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # the last one is older than a minute
    (other / "lanes.jsonl").unlink()
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "process 1 on node-1 · dead" in screen_text(pilot.app))
        assert "▶ training" in screen_text(pilot.app)


@pytest.mark.long
@driven
async def test_many_devices_are_reached_by_scrolling(make: Made, tmp_path: Path):
    run = make_two(tmp_path / "runs", devices=8)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        app.animation_level = "none"
        await until(pilot, lambda: "process 0 on node-0" in screen_text(app))
        text = await settled(pilot)
        assert "Host 0" in text and "Log" in text and "process 1" not in text
        await press_until(pilot, "tab", lambda: app.focused is not None and app.focused.id == "devices")
        await press_until(pilot, "end", lambda: "process 1 on node-1" in screen_text(app))


@pytest.mark.long
@driven
async def test_a_replay_shows_all_processes(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=STEPS, total=STEPS, processes=2, end="finished")
    async with make(attach=run).run_test(size=(120, 36)) as pilot:
        app = pilot.app
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and "✓ finished" in screen_text(app))
        await press_until(pilot, "v", lambda: "▷ replay" in screen_text(app))
        await pilot.press(*["plus"] * 12)
        await until(pilot, lambda: f"{STEPS}/{STEPS}" in screen_text(app))
        lanes = widget_text(app.screen.query_one(Lanes))
        assert "process 0 on node-0" in lanes and "process 1 on node-1" in lanes and "dead" not in lanes


def test_a_replay_is_each_process_as_it_was(tmp_path: Path):
    run = make_run(tmp_path, steps=STEPS, total=STEPS, processes=2, end="failed")
    replay = Replay(run)
    view = replay.view
    replay.add(replay.news(0.5 / replay.speed))
    assert view.total_steps is None and view.devices and view.processes == ()
    replay.add(replay.news(100.0 / replay.speed))
    (one,) = view.processes
    assert one.name == "process 1 on node-1" and one.now is not None and one.own_failure is None and one.step == 0
    assert one.now.time <= view.began + 100.5 and len(one.lanes) == 4 and 0 < view.step < STEPS
    while not replay.done:
        replay.add(replay.news(10.0))
    assert one.own_failure is not None and view.failure == one.own_failure


@pytest.mark.long
@driven
async def test_the_list_of_runs_counts_processes(make: Made, tmp_path: Path):
    make_two(tmp_path / "runs", name="two")
    make_run(tmp_path / "runs", name="one", steps=STEPS, end="finished")
    async with make().run_test(size=(160, 24)) as pilot:
        await pilot.press("f3")
        await until(pilot, lambda: "llama-3.1-8b, 2 processes" in screen_text(pilot.app))
        assert screen_text(pilot.app).count("processes") == 1
