"""New run: what is typed, planned, proposed, saved and started."""

from pathlib import Path

import pytest
from textual.events import Key
from textual.widgets import Button, Input, OptionList

from rptrain.errors import UserError
from rptrain.tui import heavy, launch
from rptrain.tui.choice import Choice
from rptrain.tui.run_screen import RunScreen

from .conftest import Made, Scripted, driven, planned, screen_text, until
from .recorded import make_run


def start_button(app) -> Button:
    return app.screen.query_one("#start", Button)


async def ready(pilot) -> None:
    await until(pilot, lambda: not start_button(pilot.app).disabled)


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
    written = (tmp_path / "rptrain.toml").read_text()
    assert "max_steps = 1500" in written and "learning_rate = 2e-3" in written and written.startswith("# A run")


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
        assert 'method = "lora"' in (tmp_path / "rptrain.toml").read_text()
        await pilot.press("left")
        await pilot.pause()
        assert not pilot.app.screen.query_one("#lora-r").parent.display
        await pilot.press("ctrl+s")
        assert "lora" not in (tmp_path / "rptrain.toml").read_text()


@driven
async def test_what_does_not_fit_is_not_started_and_advice_is_taken_by_a_key(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(launch, "COMMAND", ("false",))
    helper.answers[heavy.plan] = planned(fits=False)
    async with make().run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "does not fit" in screen_text(pilot.app))
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
async def test_the_mouse_does_what_keys_do(make: Made, tmp_path: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.click("#optim-update", offset=(11, 0))
        await pilot.pause()
        assert pilot.app.screen.query_one("#optim-update", Choice).value == "sync"
        await ready(pilot)
        await pilot.click("#save")
        await pilot.pause()
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
