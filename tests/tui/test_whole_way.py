"""The whole way with the real trainer, and that it does not need the interface that began it."""

import json
import os
import pty
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Button, Input

from rptrain.runs.view.run_view import RunView
from rptrain.tui.context import Context
from rptrain.tui.new_run.recipe import recipe
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.helper import ChildHelper
from rptrain.tui.services.launch import Launched

from .conftest import Made, driven, screen_text


def short_run(path: Path, steps: int) -> Draft:
    """The bundled example with fewer steps, on two workers."""
    draft = Draft(path)
    draft.update(recipe("tiny-tasks", "builtin:tasks", "full"))
    draft.update({"train.max_steps": str(steps), "optim.warmup_steps": "2", "eval.questions": ""})
    draft.update({"engine.devices": "cpu:2", "save.save_steps": "", "log.logging_steps": "1"})
    return draft


async def wait(pilot, holds, seconds: float = 240) -> None:
    """As `until`, for what takes a process."""
    last = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < last, screen_text(pilot.app)
        await pilot.pause(0.1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No trainer outlives its test."""
    begun: list[Launched] = []
    start = Context.start

    async def noted(context: Context, *given: Any) -> Launched:
        begun.append(await start(context, *given))
        return begun[-1]

    monkeypatch.setattr(Context, "start", noted)
    yield
    for one in begun:
        one.process.kill()
        one.process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
@driven
async def test_from_a_new_run_to_a_model_in_transformers(make: Made, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    short_run(tmp_path / "rptrain.toml", 12).save()
    async with make(helper=ChildHelper()).run_test(size=(120, 36), notifications=True) as pilot:
        app = pilot.app
        await wait(pilot, lambda: not app.screen.query_one("#start", Button).disabled)
        assert "✓ fits" in screen_text(app)
        await pilot.press("ctrl+r")
        await wait(pilot, lambda: "▶ training" in screen_text(app) or "✓ finished" in screen_text(app))
        await wait(pilot, lambda: "✓ finished" in screen_text(app))
        assert "12/12" in screen_text(app)
        await pilot.press("g")  # to the log's beginning
        await wait(pilot, lambda: "cpu:1" in screen_text(app))
        await pilot.press("e")
        await wait(pilot, lambda: "Export tiny-tasks" in screen_text(app))
        app.screen.query_one("#to", Input).value = str(tmp_path / "out")
        await pilot.press("enter")
        await wait(pilot, lambda: "exported to" in screen_text(app))
    assert (tmp_path / "runs" / "tiny-tasks" / "trainer.log").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.num_parameters() > 400_000 and tokenizer("Spell backwards: abc")["input_ids"]


@pytest.mark.slow
def test_a_run_does_not_notice_that_its_interface_is_killed(tmp_path: Path):
    """The interface in a terminal of its own starts a run and is killed: the run goes on to its end."""
    short_run(tmp_path / "rptrain.toml", 60).save()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="30", XDG_CONFIG_HOME=str(tmp_path))
        os.execv(sys.executable, [sys.executable, "-P", "-m", "rptrain"])
    shown = bytearray()
    threading.Thread(target=_drain, args=(terminal, shown), daemon=True).start()
    run = RunView(tmp_path / "runs" / "tiny-tasks")
    deadline = time.monotonic() + 300
    while run.step < 5:
        assert time.monotonic() < deadline, bytes(shown[-2000:])
        if not (tmp_path / "runs").exists() and b"fits" in shown:
            os.write(terminal, b"\x12")  # ctrl+r
        time.sleep(0.5)
        run.refresh()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert run.step < 60 and run.process is not None and run.process.alive
    while run.state != "finished":
        assert time.monotonic() < deadline, run.state
        time.sleep(0.5)
        run.refresh()
    lines = (run.path / "events.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if record["event"] == "step"]
    assert steps == list(range(1, 61))


def _drain(terminal: int, shown: bytearray) -> None:
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:
            return


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
@driven
async def test_a_run_is_paused_and_stopped_by_keys(make: Made, tmp_path: Path):
    short_run(tmp_path / "rptrain.toml", 100_000).save()
    async with make(helper=ChildHelper()).run_test(size=(120, 36)) as pilot:
        app = pilot.app
        await wait(pilot, lambda: not app.screen.query_one("#start", Button).disabled)
        await pilot.press("ctrl+r")
        await wait(pilot, lambda: isinstance(app.screen, RunScreen) and "▶ training" in screen_text(app))
        await pilot.press("space")
        await wait(pilot, lambda: "paused" in screen_text(app).splitlines()[1])
        await pilot.press("space")
        await wait(pilot, lambda: "▶ training" in screen_text(app))
        await pilot.press("x")
        await wait(pilot, lambda: "Stop tiny-tasks?" in screen_text(app))
        await pilot.press("y")
        await wait(pilot, lambda: "■ stopped" in screen_text(app))
    assert list((tmp_path / "runs" / "tiny-tasks" / "checkpoints").glob("checkpoint-*"))
