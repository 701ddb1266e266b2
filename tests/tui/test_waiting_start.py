"""New run: a start that is asked for before the plan is ready waits for it, until it is canceled."""

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from rptrain.tui.new_run import planning
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.services import launch
from rptrain.utils.errors import UserError

from .conftest import Made, Scripted, driven, focus, notified, planned, press_until, screen_text, type_over, until

pytestmark = pytest.mark.long

WAITS = "the run starts when the plan is ready"


@pytest.fixture
def go(helper: Scripted, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Lets plans be made: they wait for it. Runs write a file."""
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "touch begun", "trainer"))
    call, event = helper.call, asyncio.Event()

    async def slow(function, *given):
        if function is planning.plan:
            await event.wait()
        return await call(function, *given)

    monkeypatch.setattr(helper, "call", slow)
    return event


def waits(pilot: Pilot) -> bool:
    return WAITS in " ".join(screen_text(pilot.app).split())


async def ask_to_start(pilot: Pilot) -> None:
    await until(pilot, lambda: "planning" in screen_text(pilot.app))
    await press_until(pilot, "ctrl+r", lambda: waits(pilot))


@driven
async def test_a_start_waits_for_the_plan_of_the_shown_settings(make: Made, go: asyncio.Event, tmp_path: Path):
    async with make().run_test(size=(200, 36)) as pilot:
        editor = await focus(pilot, "#data-max_length")
        assert isinstance(editor, Input)
        with editor.prevent(Input.Changed):
            editor.value = "77"  # before anything heard of it
        await ask_to_start(pilot)
        assert not (tmp_path / "rptrain.toml").exists()
        go.set()
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await until(pilot, (tmp_path / "begun").exists)
    assert "max_length = 77" in (tmp_path / "rptrain.toml").read_text()


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["escape", "edit", "leave"])
@driven
async def test_a_waiting_start_is_canceled(make: Made, go: asyncio.Event, tmp_path: Path, way: str):
    async with make().run_test(size=(200, 36)) as pilot:
        await ask_to_start(pilot)
        if way == "escape":
            await press_until(pilot, "escape", lambda: not waits(pilot))
        elif way == "edit":
            await type_over(pilot, "999", "#train-max_steps")
            await until(pilot, lambda: not waits(pilot))
        else:
            await press_until(pilot, "f4", lambda: "✓ GPU" in screen_text(pilot.app))
            await press_until(pilot, "f2", lambda: "planning" in screen_text(pilot.app))
        go.set()
        await until(pilot, lambda: "✓ fits" in screen_text(pilot.app))
        assert not (tmp_path / "rptrain.toml").exists() and not isinstance(pilot.app.screen, RunScreen)


@pytest.mark.parametrize("answer", [planned(fits=False), UserError("no model 'x'")])
@driven
async def test_a_waiting_start_that_is_refused_says_why(
    make: Made, go: asyncio.Event, helper: Scripted, tmp_path: Path, answer: object
):
    helper.answers[planning.plan] = answer
    reason = "the run does not fit" if isinstance(answer, planning.Planned) else "no model 'x'"
    async with make().run_test(size=(200, 36), notifications=True) as pilot:
        await ask_to_start(pilot)
        go.set()
        await until(pilot, lambda: f"not started: {reason}" in notified(pilot.app))
        assert not waits(pilot) and not (tmp_path / "rptrain.toml").exists()
