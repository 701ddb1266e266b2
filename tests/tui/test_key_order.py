"""Input acts in the order in which it came, in every form and list, also while a plan is computed."""

import asyncio
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Event, Key, MouseDown, MouseUp, Paste
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.widget import Widget

from rptrain.tui.app import RptrainApp
from rptrain.tui.chat import session as chat_session
from rptrain.tui.export.ask_target import AskTarget
from rptrain.tui.new_run import places
from rptrain.tui.new_run.picker import Picker
from rptrain.tui.new_run.planning import plan
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.runs.run_list import RunList
from rptrain.tui.widgets.entry import Entry
from rptrain.utils.errors import UserError

from ..run_tools import PATIENCE
from .conftest import Made, Scripted, driven, notified, screen_text, until
from .recorded import make_run
from .test_chat_session import DOUBLE


class Slow(Scripted):
    """A helper whose plans and searches wait until they are `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.plans = 0

    async def call(self, function: Callable[..., Any], *given: Any) -> Any:
        self.plans += function is plan
        if function in (plan, places.models):
            await self.released.wait()
        return await super().call(function, *given)


def burst(app: RptrainApp, *strokes: str | Event) -> None:
    """Input that arrives at once. A text of several characters is the name of a key, if it is not an event."""
    for stroke in strokes:
        if isinstance(stroke, str):
            stroke = Key(_character_to_key(stroke), stroke) if len(stroke) == 1 else Key(stroke, None)
        app.post_message(stroke)


def click(app: RptrainApp, selector: str) -> list[Event]:
    region = app.screen.query_one(selector, Widget).region
    at = (region.x + 1, region.y, 0, 0, 1, False, False, False, region.x + 1, region.y)
    return [MouseDown(None, *at), MouseUp(None, *at)]


def values(app: RptrainApp) -> dict[str, str]:
    new = next(screen for stack in app._screen_stacks.values() for screen in stack if isinstance(screen, NewRun))
    return {row.field.key: row.editor.value for row in new.query("Row") if row.editor is not None}  # type: ignore


def listed(app: RptrainApp) -> int | None:
    """The number of rows on the Runs screen; None before it has its list, which comes after the screen itself."""
    lists = app.screen.query(RunList)
    return lists.first().option_count if lists else None


async def planning(pilot: Pilot[Any], helper: Slow) -> RptrainApp:
    """New run with the example, while its plan is computed."""
    await until(pilot, lambda: helper.plans > 0)
    assert isinstance(pilot.app, RptrainApp)
    return pilot.app


STEPS = ["ctrl+home", *["down"] * 4]  # to the setting of the maximum of steps
TYPED = [  # one after another, without a pause
    *("ctrl+home", *["down"] * 8, "6"),
    *(*STEPS, "6", "down", *"1e-3", "up", "7"),
    *("enter", "enter", "5", "shift+tab", "tab", "backspace", *"12", "left", "8", "home", "9"),
    *("tab", Paste("64"), "0", "ctrl+end", "ctrl+home", "tab", "tab", "right", "tab", *"32"),
]
ENTERED = {
    "train.micro_batch_size": "6",
    "train.max_steps": "7",
    "optim.warmup_steps": "9182",
    "data.max_length": "640",
    "train.method": "lora",
    "lora.r": "32",
}
WAYS = {
    "list": (["enter", "x", "escape", *STEPS, "3"], "train.max_steps", "3"),
    "list-of-settings": (["f5", *"max_grad_norm", "enter", *"0.5"], "optim.max_grad_norm", "0.5"),
    "data-set": (["ctrl+n", *"a.jsonl", "enter", "down", "2"], "data.train.1.weight", "2"),
    "screens": ([*STEPS, "6", "f3", "f2", "7", "f1", "escape", "8"], "train.max_steps", "8"),
    "palette": ([*STEPS, "ctrl+p", *"zz", "escape", "3"], "train.max_steps", "3"),
    "escape": ([*STEPS, "6", "escape", "7"], "train.max_steps", "67"),
    "repeat": ([*["down"] * 40, *["up"] * 40, *STEPS, *"11111", *["backspace"] * 4], "train.max_steps", "1"),
}


@driven
async def test_keys_act_in_the_order_in_which_they_were_typed(make: Made):
    async with make(helper=(helper := Slow())).run_test(size=(80, 24)) as pilot:
        app = await planning(pilot, helper)
        before = values(app)
        burst(app, *TYPED)
        helper.released.set()  # the plan arrives between two keys
        await acted(pilot)
        after = values(app)
        assert {key: after[key] for key in ENTERED} == ENTERED
        assert {key: after[key] for key in before if key not in ENTERED and after[key] != before[key]} == {
            "optim.learning_rate": "1e-3",
            "lora.lora_alpha": "32",  # which came with the method
        }


@driven
async def test_tab_reaches_a_setting_before_it_is_drawn(make: Made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("textual.screen.UPDATE_PERIOD", PATIENCE)  # no frame is drawn between two keys
    async with make(helper=(helper := Slow())).run_test(size=(80, 24)) as pilot:
        app = await planning(pilot, helper)
        burst(app, "ctrl+home", "down", "down", "right", "tab", *"32", "tab", *"64", "shift+tab", "4")
        await acted(pilot)
        assert (values(app)["lora.r"], values(app)["lora.lora_alpha"]) == ("4", "64")


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
@driven
async def test_a_key_acts_where_the_keys_before_it_lead(make: Made, way: str):
    strokes, key, value = WAYS[way]
    async with make(helper=(helper := Slow())).run_test(size=(80, 24)) as pilot:
        app = await planning(pilot, helper)
        burst(app, *strokes)
        await acted(pilot)
        assert values(app)[key] == value and values(app)["model.path"] == "tiny-tasks"


@driven
async def test_what_is_saved_is_what_was_typed_before_the_key(make: Made, tmp_path: Path):
    async with make(helper=(helper := Slow())).run_test(size=(80, 24)) as pilot:
        app = await planning(pilot, helper)
        burst(app, *STEPS, *"12", "ctrl+s", *"34", "f3", "x", "f2", *"56")
        await acted(pilot)
        saved = tomllib.loads((tmp_path / "rptrain.toml").read_text())
        assert saved["train"]["max_steps"] == 12 and values(app)["train.max_steps"] == "56"
        burst(app, "up", "up", *click(app, "#train-max_steps"), "2", "down", "8")
        await acted(pilot)
        assert values(app)["train.max_steps"] == "526" and values(app)["optim.learning_rate"] == "8"


@driven
async def test_keys_of_lists_and_of_a_conversation_act_in_order(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chat_session, "COMMAND", DOUBLE)
    for name in ("first", "second", "third"):
        make_run(tmp_path / "runs", name, steps=5, total=5, end="finished", alive=False)
    async with make().run_test(size=(80, 24)) as pilot:
        app = pilot.app
        assert isinstance(app, RptrainApp)
        burst(app, "f3")
        await until(pilot, lambda: listed(app) == 3)
        burst(app, "slash", *"second", "enter", "space", "slash", "escape", "c", *"one", "enter", *"two", "left", "3")
        await acted(pilot)
        await until(pilot, lambda: "second" in screen_text(app) and "tw3o" in screen_text(app))
        chat = app._shared.chat
        assert chat is not None and chat.run.name == "second"
        assert (chat.waiting or chat.turns[0].said, chat.unsent) == ("one", "tw3o")


@pytest.mark.long
@driven
async def test_keys_wait_for_a_dialog_whose_choices_are_read(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, release = make_run(tmp_path / "runs", end="finished"), threading.Event()

    def slow(path: Path) -> list[Path]:
        release.wait()
        return []

    monkeypatch.setattr("rptrain.tui.export.exporting.saved_checkpoints", slow)
    async with make().run_test(size=(80, 24)) as pilot:
        app = pilot.app
        assert isinstance(app, RptrainApp)
        burst(app, "f3")
        await until(pilot, lambda: run.name in screen_text(app))
        burst(app, "e", *"dy")  # in the list, d deletes a run, and y answers the question
        await pilot.pause(0.2)
        release.set()
        await acted(pilot)
        await until(pilot, lambda: isinstance(app.screen, AskTarget))
        assert run.exists() and "dy" in screen_text(app)


@pytest.mark.long
@driven
async def test_a_preset_is_taken_only_if_it_was_named_or_moved_to(make: Made):
    async with make(helper=(helper := Slow())).run_test(size=(80, 24)) as pilot:
        app = await planning(pilot, helper)
        burst(app, *"own", "down", "up", "enter", "enter")
        await acted(pilot)
        await until(pilot, lambda: isinstance(app.screen, Picker) and "searching …" in screen_text(app))
        helper.released.set()
        await until(pilot, lambda: "preset, config only, no weights: Llama" in screen_text(app))
        assert "searching …" not in screen_text(app)
        burst(app, "enter")
        await acted(pilot)
        assert isinstance(app.screen, Picker)
        burst(app, "down", "enter", "enter", *"llama", "enter")
        await acted(pilot)
        await until(pilot, lambda: values(app)["model.path"] == "llama-3.1-8b")


@driven
async def test_enter_on_a_name_waits_for_the_search(make: Made):
    async with make(helper=(helper := Slow())).run_test(size=(80, 24)) as pilot:
        app = await planning(pilot, helper)
        burst(app, "enter", *"llama", "enter")
        await acted(pilot)
        assert isinstance(app.screen, Picker)
        helper.released.set()
        await until(pilot, lambda: values(app)["model.path"] == "llama-3.1-8b")


@pytest.mark.long
@driven
async def test_a_plan_is_not_shown_for_other_settings_than_its_own(make: Made):
    helper = Slow()
    helper.released.set()
    async with make(helper=helper).run_test(size=(120, 36), notifications=True) as pilot:
        app = await planning(pilot, helper)
        await until(pilot, lambda: "✓ fits" in screen_text(app))
        helper.released.clear()
        burst(app, *STEPS, "7")
        await acted(pilot)
        await until(pilot, lambda: "planning … (previous plan below)" in screen_text(app))
        assert "2 checkpoints of 45.0 GiB" in screen_text(app)
        burst(app, "ctrl+home", *"own")
        await acted(pilot)
        await until(pilot, lambda: "weights bfloat16 (was float32)" in notified(app))
        await until(pilot, lambda: "2 checkpoints of 45.0 GiB" not in screen_text(app))  # below the message
        assert "max steps" not in notified(app)
        helper.answers[plan] = UserError("about an earlier setting")
        editor = app.screen.query_one("#optim-learning_rate", Entry)
        with editor.prevent(Entry.Changed):  # no message says so yet
            editor.value = "3e-4"
        plans = helper.plans
        helper.released.set()
        helper.released = asyncio.Event()
        await until(pilot, lambda: helper.plans > plans)
        assert "about an earlier setting" not in await screen_after(pilot)


async def screen_after(pilot: Pilot[Any]) -> str:
    """The screen's text once what changed is drawn."""
    await pilot.pause(0.1)
    return screen_text(pilot.app)


async def acted(pilot: Pilot[Any]) -> None:
    """Waits until all input has acted."""
    await pilot.pause()
    assert isinstance(pilot.app, RptrainApp)
    turns = pilot.app._turns
    await until(pilot, lambda: turns._giving is None)
