"""The first run: from an empty folder to training, by few keys."""

from pathlib import Path

import pytest
from textual.events import Key
from textual.widgets import OptionList

from rptrain.tui.new_run import places, planning
from rptrain.tui.new_run.first_run import FirstRun
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.services import launch
from rptrain.utils.errors import UserError

from .conftest import Made, Scripted, driven, notified, planned, press_until, screen_text, settled, type_over, until
from .recorded import make_run

pytestmark = pytest.mark.long


async def asked(pilot, step: int) -> None:
    """Waits for a question with its items."""
    await until(pilot, lambda: f"{step} of 3" in screen_text(pilot.app))
    await until(pilot, lambda: pilot.app.screen.query_one(OptionList).option_count > 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [(60, 16), (80, 24), (200, 50)])
@driven
async def test_three_keys_lead_from_an_empty_folder_to_training(
    make: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: tuple[int, int]
):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "touch begun", "trainer"))
    async with make(welcome=True).run_test(size=size) as pilot:
        for step in (1, 2, 3):
            await asked(pilot, step)
            await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await until(pilot, (tmp_path / "begun").exists)
    text = (tmp_path / "rptrain.toml").read_text()
    assert 'path = "tiny-tasks"' in text and "max_steps = 1500" in text and 'method = "full"' in text


@driven
async def test_three_keys_at_once_are_enough(make: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Before the lists of models and data are complete."""
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "touch begun", "trainer"))
    async with make(welcome=True).run_test(size=(80, 24)) as pilot:
        await asked(pilot, 1)
        for _ in range(3):
            pilot.app.post_message(Key("enter", None))
        await until(pilot, (tmp_path / "begun").exists)


@driven
async def test_other_answers_bring_their_settings_and_esc_leads_back(make: Made, tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text("{}\n")
    async with make(welcome=True).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await asked(pilot, 1)
        await until(pilot, lambda: "llama-3.1-8b" in screen_text(app))
        await pilot.press(*"llama", "enter")
        await asked(pilot, 2)
        await press_until(pilot, "escape", lambda: "1 of 3" in screen_text(app))
        await until(pilot, lambda: "llama-3.1-8b" in screen_text(app))
        await pilot.press(*"llama", "enter")
        await asked(pilot, 2)
        await pilot.press(*"chats", "enter")
        await asked(pilot, 3)
        assert "llama-3.1-8b   chats.jsonl" in screen_text(app)
        await pilot.press(*"4-bit", "f2")  # all settings, with the answers so far
        await until(pilot, lambda: isinstance(app.screen, NewRun))
        await settled(pilot)
        assert app.screen.query_one("#model-path").value == "llama-3.1-8b"
        assert app.screen.query_one("#data-max_length").value == "2048"
        assert not (tmp_path / "rptrain.toml").exists() and not (tmp_path / "runs").exists()


@driven
async def test_adapters_are_offered_only_for_a_model_with_weights(make: Made, helper: Scripted):
    app = make(welcome=True)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        for model, weights in (("tiny", True), ("llama", False), ("llama", True)):
            helper.answers[places.has_weights] = weights
            offered = weights and model != "tiny"
            await asked(pilot, 1)
            await until(pilot, lambda: "llama-3.1-8b" in screen_text(app))
            await pilot.press(*model, "enter")
            await asked(pilot, 2)
            await pilot.press("enter")
            await asked(pilot, 3)
            await until(pilot, lambda offered=offered: ("4-bit" if offered else "need pretrained") in screen_text(app))
            if not offered:
                assert "4-bit" not in screen_text(app)
                app._shown_until.clear()  # else an equal notice is not shown again
                notes = len(app._notifications)
                await pilot.press("down", "enter")
                await until(pilot, lambda notes=notes: len(app._notifications) > notes)
                assert "3 of 3" in screen_text(app)
            await press_until(pilot, "escape", lambda: "2 of 3" in screen_text(app))
            await press_until(pilot, "escape", lambda: "1 of 3" in screen_text(app))


@driven
async def test_what_is_in_the_current_folder_is_offered_first(make: Made, helper: Scripted, tmp_path: Path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").touch()
    (tmp_path / "chats.jsonl").write_text("{}\n")
    helper.answers[places.models] = UserError("the list is not complete yet")
    async with make(welcome=True).run_test(size=(80, 24)) as pilot:
        await asked(pilot, 1)
        await pilot.press("enter")
        await asked(pilot, 2)
        assert "my-model" in screen_text(pilot.app)
        await pilot.press("enter")
        await asked(pilot, 3)
        assert "my-model   chats.jsonl" in screen_text(pilot.app)


@driven
async def test_data_is_shown_before_it_is_chosen(make: Made, helper: Scripted, tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text("{}\n")
    app = make(welcome=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await asked(pilot, 1)
        await pilot.press("enter")
        await asked(pilot, 2)
        await pilot.press(*"chats")
        await until(pilot, lambda: "Two and two?" in screen_text(app) and "1.14 MiB" in screen_text(app))
        assert 'path = "chats.jsonl"' in helper.asked[-1][2] and 'path = "tiny-tasks"' in helper.asked[-1][2]
        await type_over(pilot, "./chats.jsonl")  # a path that is not in the list
        await until(pilot, lambda: 'path = "./chats.jsonl"' in helper.asked[-1][2])


@driven
async def test_a_first_run_that_does_not_fit_shows_its_plan(make: Made, helper: Scripted, tmp_path: Path):
    helper.answers[planning.plan] = planned(fits=False)
    async with make(welcome=True).run_test(size=(80, 24)) as pilot:
        for step in (1, 2, 3):
            await asked(pilot, step)
            await pilot.press("enter")
        await until(pilot, lambda: "does not fit" in screen_text(pilot.app))
        helper.answers[planning.plan] = planned()
        await press_until(pilot, "alt+1", lambda: "✓ fits" in screen_text(pilot.app))
        assert isinstance(pilot.app.screen, NewRun) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("own", ["model", "data"])
@driven
async def test_a_model_or_data_of_ones_own_leads_to_the_plan(make: Made, tmp_path: Path, own: str):
    (tmp_path / "chats.jsonl").write_text("{}\n")
    app = make(welcome=True)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await asked(pilot, 1)
        await until(pilot, lambda: "llama-3.1-8b" in screen_text(app))
        assert "enter choose" in screen_text(app)
        await pilot.press(*("llama" if own == "model" else ""), "enter")
        await asked(pilot, 2)
        await until(pilot, lambda: "chats.jsonl" in screen_text(app))
        await pilot.press(*("chats" if own == "data" else ""), "enter")
        await asked(pilot, 3)
        assert "enter see the plan" in screen_text(app)
        await press_until(pilot, "enter", lambda: "ctrl+r starts it" in notified(app))
        await settled(pilot)
        assert "fits" in screen_text(app) and isinstance(app.screen, NewRun)
    assert not (tmp_path / "rptrain.toml").exists() and not (tmp_path / "runs").exists()


@driven
async def test_the_example_says_that_its_last_answer_starts_training(make: Made):
    async with make(welcome=True).run_test(size=(80, 24)) as pilot:
        for step in (1, 2):
            await asked(pilot, step)
            await pilot.press("enter")
        await asked(pilot, 3)
        assert "enter start training" in screen_text(pilot.app)
        await press_until(pilot, "escape", lambda: "2 of 3" in screen_text(pilot.app))
        assert "enter choose" in screen_text(pilot.app)


@pytest.mark.parametrize("there", ["run", "config"])
@driven
async def test_the_questions_are_for_a_first_run_only(make: Made, tmp_path: Path, there: str):
    if there == "run":
        make_run(tmp_path / "runs")
    else:
        (tmp_path / "rptrain.toml").write_text("[model]\npath = 'tiny-tasks'\n")
    async with make(welcome=True).run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        assert not isinstance(pilot.app.screen, FirstRun)


@driven
async def test_the_questions_have_help_and_are_asked_again_by_a_key(make: Made, tmp_path: Path):
    app = make(welcome=True)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await asked(pilot, 1)
        assert "esc F2 all settings" in screen_text(app) and "F1 keys" in screen_text(app)
        await press_until(pilot, "f1", lambda: "the question before" in screen_text(app))
        await press_until(pilot, "escape", lambda: "1 of 3" in screen_text(app))
        await press_until(pilot, "escape", lambda: "F7 asks the three questions again" in notified(app))
        await settled(pilot)
        await press_until(pilot, "f7", lambda: "1 of 3" in screen_text(app))
        await until(pilot, lambda: "llama-3.1-8b" in screen_text(app))
        await pilot.press(*"llama", "enter")
        await asked(pilot, 2)
        await press_until(pilot, "f2", lambda: isinstance(app.screen, NewRun))
        await until(pilot, lambda: app.screen.query_one("#model-path").value == "llama-3.1-8b")
        assert not (tmp_path / "rptrain.toml").exists()
