"""The end of a run is announced by the terminal, and by a note on other screens."""

import json
import re
from pathlib import Path

import pytest

from rptrain.tui.messages import OpenRun
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.outcomes import outcome, still_trains
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.runs.screen import Runs
from rptrain.tui.services import launch

from .conftest import Made, Scripted, driven, notified, press_until, screen_text, settled, until
from .recorded import BEGAN, make_run


@pytest.mark.parametrize(
    ("end", "alive", "text"),
    [
        ("finished", True, "llama finished after 20 steps: median loss 3."),
        ("stopped", True, "llama stopped after step 20"),
        ("failed", True, "llama failed: EngineError: cuda:1 fell off the bus"),
        (None, False, "llama dead: The trainer was killed (SIGKILL)"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, end: str | None, alive: bool, text: str):
    run = make_run(tmp_path, steps=20, end=end, alive=alive)
    said, severity = outcome(run, -9, BEGAN)
    assert said.startswith(text) and severity == ("information" if end in ("finished", "stopped") else "error")
    assert outcome(run, 2, BEGAN + 1) == ("llama did not start", "error")


def test_runs_that_still_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("runs"), steps=20)
    sentence = "llama keeps training (step 20 of 1,000): rptrain attach llama"
    assert still_trains(run, starting=True) == still_trains(run, starting=False) == sentence
    elsewhere = make_run(tmp_path / "my runs", "bert", steps=5)
    with (elsewhere / "events.jsonl").open("a") as file:
        file.write(json.dumps({"schema": 1, "event": "paused", "time": BEGAN + 300, "step": 5}) + "\n")
    sentence = f"bert is paused (step 5 of 1,000): rptrain attach '{elsewhere}'"
    assert still_trains(elsewhere, starting=False) == sentence
    ended = make_run(Path("runs"), "ended", steps=5, end="stopped")
    assert still_trains(ended, starting=False) is None
    assert still_trains(ended, starting=True) == "ended is starting: rptrain attach ended"


@pytest.mark.long
@driven
async def test_the_app_knows_which_runs_still_train(make: Made, tmp_path: Path):
    run, ended = make_run(tmp_path / "runs", steps=20), make_run(tmp_path / "runs", "ended", steps=5, end="stopped")
    app = make(attach=run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "training" in screen_text(app))
        app.post_message(OpenRun(ended))
        await until(pilot, lambda: "stopped" in screen_text(app))
        await pilot.press("ctrl+q")
    assert [text.split()[0] for text in app.still_training()] == ["llama"]


@pytest.mark.long
@driven
async def test_a_run_that_ends_in_sight_rings_and_needs_no_note(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(tmp_path / "runs", steps=20)
    app = make(attach=run)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: "training" in screen_text(app))
        await settled(pilot)
        written: list[str] = []
        assert app._driver is not None
        monkeypatch.setattr(app._driver, "write", written.append)
        monkeypatch.setattr(app, "bell", lambda: written.append("bell"))
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"schema": 1, "event": "finished", "time": BEGAN + 300, "step": 20}) + "\n")
        await until(pilot, lambda: "\x1b]9;rptrain: llama finished after 20 steps: median loss" in "".join(written))
        assert "bell" in written and "finished after" not in notified(app)


@pytest.mark.long
@driven
async def test_a_run_is_listed_from_its_start_until_that_fails(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "while ! test -e go; do sleep 0.1; done; exit 3"))
    app = make()
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: "fits" in screen_text(app))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and "the trainer is starting" in screen_text(app))
        await press_until(pilot, "escape", lambda: isinstance(app.screen, Runs))
        await until(pilot, lambda: "tiny-tasks      … starting" in screen_text(app))
        assert re.search(r"starting .* \d+ s", screen_text(app)), "the time since its start"
        keys = screen_text(app).splitlines()[-1]
        assert "open" in keys and not any(key in keys for key in ("compare", "export", "chat", "delete", "resume"))
        await press_until(pilot, "enter", lambda: isinstance(app.screen, RunScreen))
        assert "the trainer is starting" in screen_text(app)
        await press_until(pilot, "escape", lambda: isinstance(app.screen, Runs))
        Path("go").touch()
        await until(pilot, lambda: "No run in" in screen_text(app))


@pytest.mark.long
@driven
async def test_a_run_that_ends_out_of_sight_is_told_on_any_screen(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "while ! test -e go; do sleep 0.1; done; exit 3"))
    monkeypatch.setattr("rptrain.tui.app.CHECK_AFTER", 0.05)
    app = make()
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: "fits" in screen_text(app))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and "the trainer is starting" in screen_text(app))
        await press_until(pilot, "f2", lambda: isinstance(app.screen, NewRun))
        Path("go").touch()
        await until(pilot, lambda: "did not start" in notified(app))
        await settled(pilot)
        assert notified(app).count("did not start") == 1
