"""New run: what is typed, planned, proposed, saved and started."""

import asyncio
from pathlib import Path

import pytest
from textual.events import Key
from textual.widgets import Button, Input, OptionList

from rptrain.config import keys
from rptrain.config_source import resolve
from rptrain.errors import UserError
from rptrain.tui import heavy, launch, places
from rptrain.tui.choice import Choice
from rptrain.tui.draft import STARTER
from rptrain.tui.fields import ALL
from rptrain.tui.helper import HelperError
from rptrain.tui.picker import MOST, Item, Picker
from rptrain.tui.run_screen import RunScreen

from .conftest import Made, Scripted, driven, planned, screen_text, until
from .recorded import make_run


def start_button(app) -> Button:
    return app.screen.query_one("#start", Button)


async def ready(pilot) -> None:
    await until(pilot, lambda: not start_button(pilot.app).disabled)


def written(folder: Path) -> str:
    path = folder / "rptrain.toml"
    return path.read_text() if path.exists() else ""


async def put(pilot, field: str, value: str) -> None:
    """Types a value in place of what is there."""
    editor = pilot.app.screen.query_one(f"#{field}", Input)
    editor.focus()
    await pilot.press("home", "ctrl+k", *value)


@driven
async def test_an_empty_folder_begins_with_the_example(make: Made, helper: Scripted, tmp_path: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        text = screen_text(pilot.app)
        assert "tiny-tasks" in text and "builtin:tasks" in text and "✓ fits" in text
        assert "8.42 s a step" in text and "15,566 tokens/s" in text and "105 GiB of 200 GiB" in text
        assert not (tmp_path / "rptrain.toml").exists()
        await pilot.press("ctrl+s")
        await until(pilot, (tmp_path / "rptrain.toml").exists)
    text = written(tmp_path)
    assert "max_steps = 1500" in text and "learning_rate = 2e-3" in text and text.startswith("# A run")


@driven
async def test_the_plan_follows_what_is_typed(make: Made, helper: Scripted):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await put(pilot, "data-max_length", "64")
        await until(pilot, lambda: "max_length = 64" in helper.asked[-1][2])
        await put(pilot, "data-max_length", "x")
        await until(pilot, lambda: "Not ready" in screen_text(pilot.app))
        assert start_button(pilot.app).disabled
        helper.answers[heavy.plan] = UserError("no model 'x'")
        await put(pilot, "data-max_length", "32")
        await until(pilot, lambda: "no model 'x'" in screen_text(pilot.app))


@driven
async def test_another_model_brings_its_own_settings_but_not_over_ones_by_hand(make: Made):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await put(pilot, "train-global_batch_size", "8")
        await put(pilot, "model-path", "llama-3.1-8b")
        await ready(pilot)
        shown = {field.id: field.value for field in pilot.app.screen.query(Input)}
        assert (shown["data-max_length"], shown["optim-learning_rate"]) == ("128", "1e-5")
        assert shown["train-global_batch_size"] == "8"
        assert pilot.app.screen.query_one("#model-dtype", Choice).value == "bfloat16"


@driven
async def test_adapters_bring_their_rows_and_take_them_away(make: Made, tmp_path: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        pilot.app.screen.query_one("#train-method").focus()
        assert not pilot.app.screen.query_one("#lora-r").parent.display
        await pilot.press("right")
        await pilot.pause()
        assert pilot.app.screen.query_one("#lora-r").parent.display
        await pilot.press("ctrl+s")
        await until(pilot, lambda: 'method = "lora"' in written(tmp_path))
        await pilot.press("left")
        await pilot.pause()
        assert not pilot.app.screen.query_one("#lora-r").parent.display
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "lora" not in written(tmp_path))


@driven
async def test_what_does_not_fit_is_not_started_and_advice_is_taken_by_a_key(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(launch, "COMMAND", ("false",))
    helper.answers[heavy.plan] = planned(fits=False)
    async with make().run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "does not fit" in screen_text(pilot.app))
        assert start_button(pilot.app).disabled
        await pilot.click("#start")
        await pilot.press("ctrl+r")
        await pilot.pause()
        assert not isinstance(pilot.app.screen, RunScreen) and not (tmp_path / "runs").exists()
        helper.answers[heavy.plan] = planned()
        pilot.app.screen.query_one("#advice", OptionList).focus()
        await pilot.press("down", "enter")
        await ready(pilot)
        assert "micro_batch_size = 1\n" in helper.asked[-1][2]


@driven
async def test_a_plan_of_what_stood_there_before_starts_nothing(make: Made, tmp_path: Path, monkeypatch):
    async with make().run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        monkeypatch.setattr("rptrain.tui.new_run.PAUSE", 100.0)
        await put(pilot, "data-max_length", "999999")
        await pilot.press("ctrl+r")
        await pilot.pause()
        assert not (tmp_path / "runs").exists() and not isinstance(pilot.app.screen, RunScreen)


@driven
async def test_start_saves_begins_a_process_and_shows_it(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", 'echo "said: $NO_COLOR $@"', "trainer"))
    monkeypatch.setenv("NO_COLOR", "1")
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await until(pilot, lambda: "could not begin" in screen_text(pilot.app))
        assert 'said: 1 --config rptrain.toml save.resume=never log.run_name="tiny-tasks"' in screen_text(pilot.app)
        assert helper.closed == 1 and (tmp_path / "rptrain.toml").exists()


@driven
async def test_a_key_that_repeats_starts_one_trainer(make: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "echo begun >> begun", "trainer"))
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        for _ in range(2):
            pilot.app.post_message(Key("ctrl+r", None))
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await until(pilot, lambda: "could not begin" in screen_text(pilot.app))
    assert (tmp_path / "begun").read_text() == "begun\n"


@driven
async def test_models_and_data_are_chosen_from_lists(make: Made, helper: Scripted, tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text("{}\n")
    async with make().run_test(size=(100, 30)) as pilot:
        await ready(pilot)
        pilot.app.screen.query_one("#model-path").focus()
        await pilot.press("enter")
        await until(pilot, lambda: "8.0 B  Llama" in screen_text(pilot.app))
        await pilot.press(*"llama", "enter")
        await until(pilot, lambda: pilot.app.screen.id == "_default" or len(pilot.app.screen_stack) == 1)
        assert pilot.app.screen.query_one("#model-path", Input).value == "llama-3.1-8b"
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "chats.jsonl" in screen_text(pilot.app))
        await pilot.press(*"chats")
        await until(pilot, lambda: "Two and two?" in screen_text(pilot.app))
        await pilot.press("enter")
        await pilot.pause()
        assert pilot.app.screen.query_one("#data-train-0-path", Input).value == "chats.jsonl"
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "Data on this machine" in screen_text(pilot.app))
        await pilot.press("escape")
        await pilot.pause()
        assert "Data on this machine" not in screen_text(pilot.app)


@driven
async def test_a_new_run_takes_over_a_past_ones_settings(make: Made, tmp_path: Path):
    make_run(tmp_path / "runs", "old", model="qwen3-1.7b", end="finished", total=77)
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: "runs/old" in screen_text(pilot.app))
        await pilot.press("enter")
        await pilot.pause()
        await ready(pilot)
        shown = {field.id: field.value for field in pilot.app.screen.query(Input)}
        assert (shown["model-path"], shown["train-max_steps"]) == ("qwen3-1.7b", "77")


@driven
async def test_a_config_that_was_changed_outside_is_not_written_over_unasked(make: Made, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "touch begun"))
    path = tmp_path / "rptrain.toml"
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.press("ctrl+s")
        await until(pilot, path.exists)
        path.write_text("# mine\n")
        for key in ("ctrl+s", "ctrl+r"):
            await pilot.press(key)
            await until(pilot, lambda: "Write over rptrain.toml?" in screen_text(pilot.app))
            await pilot.press("enter")
            await until(pilot, lambda: "Write over" not in screen_text(pilot.app))
        assert path.read_text() == "# mine\n" and not (tmp_path / "begun").exists()
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "Write over rptrain.toml?" in screen_text(pilot.app))
        await pilot.press("y")
        await until(pilot, (tmp_path / "begun").exists)
    assert "tiny-tasks" in path.read_text()


@driven
async def test_every_key_can_be_set(make: Made, tmp_path: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.press("f5")
        await until(pilot, lambda: "All settings" in screen_text(pilot.app))
        assert len(ALL) == len(keys())
        await pilot.press(*"aux_loss")
        await until(pilot, lambda: "keeps the load of experts even" in screen_text(pilot.app))
        await pilot.press("enter")
        await until(pilot, lambda: getattr(pilot.app.focused, "id", "") == "train-router_aux_loss_coef")
        await pilot.press(*"0.01")
        await pilot.press("f5", *"learning_rate", "enter")
        await until(pilot, lambda: getattr(pilot.app.focused, "id", "") == "optim-learning_rate")
        await pilot.press("ctrl+s")
        await until(pilot, (tmp_path / "rptrain.toml").exists)
    config = resolve(tmp_path / "rptrain.toml").config
    assert config.train.router_aux_loss_coef == 0.01 and config.optim.learning_rate == 2e-3


@driven
async def test_what_a_config_sets_beside_the_form_is_shown(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(STARTER + "[optim]\neps = 1e-7\n[train]\nfreeze = ['*.0.*']\n")
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        shown = {field.id: field.value for field in pilot.app.screen.query(Input)}
        assert (shown["optim-eps"], shown["train-freeze"]) == ("1e-7", "['*.0.*']")
        await put(pilot, "optim-eps", "1e-6")
        await until(pilot, lambda: "*" in screen_text(pilot.app).splitlines()[0])
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "eps = 1e-6" in (tmp_path / "rptrain.toml").read_text())


@driven
async def test_what_is_left_is_called_off_and_taken_up_again(make: Made, helper: Scripted):
    """A plan and a look at the machine are not made for nobody; help over them does not matter."""
    ended: list[str] = []
    is_slow = [True]
    call = helper.call

    async def slow(function, *given):
        if function in (heavy.plan, heavy.doctor) and is_slow:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                ended.append(function.__name__)
                raise
        return await call(function, *given)

    helper.call = slow
    async with make().run_test(size=(80, 24)) as pilot:
        await pilot.press("f1", "escape", "f4")
        await until(pilot, lambda: ended == ["plan"])
        await pilot.press("f1", "escape")
        await pilot.pause()
        assert ended == ["plan"]
        await pilot.press("f2")
        await until(pilot, lambda: ended == ["plan", "doctor"])
        is_slow.clear()
        await pilot.press("f4")
        await until(pilot, lambda: "✓ GPU" in screen_text(pilot.app))
        await pilot.press("f2")
        await ready(pilot)


@driven
async def test_a_list_that_cannot_be_made_says_why(make: Made, helper: Scripted):
    helper.answers[places.models] = HelperError("the helper process ended")
    async with make().run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        pilot.app.screen.query_one("#model-path").focus()
        await pilot.press("enter")
        await until(pilot, lambda: "the helper process ended" in screen_text(pilot.app))
        await pilot.press("escape")
        await ready(pilot)


@driven
async def test_a_long_list_shows_a_part_and_finds_all(make: Made):
    async def find() -> list[Item]:
        return [Item(f"part-{number:05}[red]", "x") for number in range(20_000)]

    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        chosen: list[str | None] = []
        app.push_screen(Picker("Many", find), chosen.append)
        await until(pilot, lambda: "part-00000[red]" in screen_text(app))
        assert app.screen.query_one(OptionList).option_count == MOST + 1
        await pilot.press(*"19999", "enter")
        await until(pilot, lambda: chosen == ["part-19999[red]"])


@driven
async def test_the_mouse_does_what_keys_do(make: Made, tmp_path: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.click("#optim-update", offset=(11, 0))
        await pilot.pause()
        assert pilot.app.screen.query_one("#optim-update", Choice).value == "sync"
        await ready(pilot)
        await pilot.click("#save")
        await until(pilot, (tmp_path / "rptrain.toml").exists)
        assert 'update = "sync"' in (tmp_path / "rptrain.toml").read_text()


def test_real_plans_and_previews_are_values(tmp_path: Path):
    from rptrain.tui.draft import Draft
    from rptrain.tui.recipe import recipe

    draft = Draft(tmp_path / "rptrain.toml")
    draft.update(recipe("tiny-tasks", "builtin:tasks", "full"))
    draft.put("engine.devices", "cpu:2")
    found = heavy.plan(draft.path, draft.text)
    assert found.fits and found.report["plan"]["seconds_per_step"] > 0 and found.stages
    preview = heavy.preview(draft.path, draft.text)
    learned = [sample.text[slice(*sample.spans[0])] for sample in preview.samples]
    assert len(learned) == 3 and all(text.endswith(("⊲end⊳", "end⊳", "▷", "⊳")) or "end" in text for text in learned)
    assert all(not text.startswith(sample.text[:3]) for text, sample in zip(learned, preview.samples, strict=True))
    draft.put("data.train.0.path", "none.jsonl")
    with pytest.raises(UserError, match="no such data file"):
        heavy.preview(draft.path, draft.text)
