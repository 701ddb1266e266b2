"""New run: what is typed, planned, proposed, saved and started."""

import asyncio
import tomllib
from pathlib import Path

import pytest
from textual._xterm_parser import XTermParser
from textual.events import Key
from textual.widgets import Button, Input, OptionList

from rptrain.config.resolve import resolve
from rptrain.config.schema import keys
from rptrain.tui.dialogs.confirm import Confirm
from rptrain.tui.dialogs.dialog import Dialog
from rptrain.tui.doctor import machine
from rptrain.tui.new_run import places, planning
from rptrain.tui.new_run.draft_file import invalid_values
from rptrain.tui.new_run.form import Form, Row
from rptrain.tui.new_run.picker import MAX_ITEMS, Item, Picker, Question
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.services import launch
from rptrain.tui.services.draft import STARTER, Draft
from rptrain.tui.services.fields import ALL
from rptrain.tui.services.helper import HelperError
from rptrain.utils.errors import UserError

from .conftest import (
    Made,
    Scripted,
    driven,
    focus,
    notified,
    planned,
    press_until,
    screen_text,
    settled,
    type_over,
    until,
)
from .recorded import make_run

pytestmark = pytest.mark.long


def start_button(app) -> Button:
    return app.screen.query_one("#start", Button)


async def ready(pilot) -> None:
    await until(pilot, lambda: any(not button.disabled for button in pilot.app.screen.query("#start")))


def written(folder: Path) -> str:
    path = folder / "rptrain.toml"
    return path.read_text() if path.exists() else ""


def shown(app, *fields: str) -> list[str]:
    """What stands in the form."""
    return [editor.value for field in fields for editor in app.screen.query(f"#{field}")]


def late_write(app, field: str, value: str) -> None:
    """What stands in a line before anything heard of it."""
    editor = app.screen.query_one(f"#{field}", Input)
    with editor.prevent(Input.Changed):
        editor.value = value


@driven
async def test_an_empty_folder_begins_with_the_example(make: Made, helper: Scripted, tmp_path: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        text = await settled(pilot)
        assert "tiny-tasks" in text and "builtin:tasks" in text and "✓ fits" in text
        assert "8.42 s per step" in text and "15,566 tokens/s" in text and "105 GiB of 200 GiB" in text
        assert not (tmp_path / "rptrain.toml").exists()
        await pilot.press("ctrl+s")
        await until(pilot, (tmp_path / "rptrain.toml").exists)
    text = written(tmp_path)
    assert "max_steps = 1500" in text and "learning_rate = 2e-3" in text and text.startswith("# A run")


@driven
async def test_max_steps_decides_in_place_of_the_epochs(make: Made):
    async with make().run_test(size=(120, 50)) as pilot:
        await until(pilot, lambda: "max steps decides" in screen_text(pilot.app))
        await type_over(pilot, "", "#train-max_steps")
        await until(pilot, lambda: "max steps decides" not in screen_text(pilot.app))


@driven
async def test_the_plan_follows_what_is_typed(make: Made, helper: Scripted):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await type_over(pilot, "64", "#data-max_length")
        await until(pilot, lambda: "max_length = 64" in helper.asked[-1][2])
        await ready(pilot)
        await type_over(pilot, "x", "#data-max_length")
        await until(pilot, lambda: "✗ must be a whole number" in screen_text(pilot.app))
        text = await settled(pilot)
        assert start_button(pilot.app).disabled and "· sequence length (data.max_length) must be" in text
        assert "the plan before this change" in text and "8.42 s per step" in text  # the rest stays
        helper.answers[planning.plan] = UserError("no model 'x'")
        await type_over(pilot, "much", "#log-report_to")
        await until(pilot, lambda: "✗ must be one of" in screen_text(pilot.app))  # an item of a list
        await type_over(pilot, "wandb", "#log-report_to")
        await type_over(pilot, "32", "#data-max_length")
        await until(pilot, lambda: "no model 'x'" in screen_text(pilot.app))
        assert "✗ must be" not in screen_text(pilot.app)


@driven
async def test_a_start_beside_an_invalid_value_says_which_one_and_leads_to_it(make: Made, helper: Scripted):
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        app = pilot.app
        await ready(pilot)
        await type_over(pilot, "x", "#train-max_steps")
        await until(pilot, lambda: "✗ must be a whole number" in screen_text(app))
        await focus(pilot, "#log-report_to")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "not started: max steps (train.max_steps) must be a whole number" in notified(app))
        await until(pilot, lambda: app.focused is app.screen.query_one("#train-max_steps"))
        assert "fits" not in notified(app)


@driven
async def test_an_invalid_value_is_saved_and_named(make: Made, tmp_path: Path):
    async with make().run_test(size=(120, 36), notifications=True) as pilot:
        await ready(pilot)
        await type_over(pilot, "x", "#train-max_steps")
        await press_until(pilot, "ctrl+s", lambda: "saved to" in notified(pilot.app))
        named = "the value of max steps (train.max_steps) is invalid and saved as written"
        assert notified(pilot.app) == f"saved to rptrain.toml; {named}" and 'max_steps = "x"' in written(tmp_path)


def test_every_invalid_value_is_named():
    assert invalid_values(["train.max_steps", "data.train.0.path", "seed"]) == (
        "the values of max steps (train.max_steps), data (data.train.0.path) and seed are invalid and saved as written"
    )


@driven
async def test_what_is_no_toml_is_told_and_neither_started_nor_saved(make: Made, tmp_path: Path):
    """Also where another setting was changed since, and until it is mended or put back."""
    (tmp_path / "rptrain.toml").write_text(text := STARTER + "[optim]\nbetas = [0.9, 0.95]\n")
    async with make().run_test(size=(120, 36), notifications=True) as pilot:
        app = pilot.app
        await ready(pilot)
        await type_over(pilot, "8", "#train-global_batch_size")
        await type_over(pilot, "[0.9, 0.9", "#optim-betas")
        await until(pilot, lambda: "· optim.betas: the value is not valid TOML" in screen_text(app))
        for field, value in (("#train-global_batch_size", "16"), ("#model-path", "llama-3.1-8b")):
            await type_over(pilot, value, field)
            await settled(pilot)
            assert "· optim.betas: the value is not valid TOML" in screen_text(app) and start_button(app).disabled
            assert shown(app, "optim-betas") == ["[0.9, 0.9"]
        await press_until(pilot, "f4", lambda: "✓ GPU" in screen_text(app))
        await press_until(pilot, "f2", lambda: "· optim.betas: the value is not valid TOML" in screen_text(app))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "optim.betas: the value is not valid TOML" in notified(app))
        assert written(tmp_path) == text
        await type_over(pilot, "[0.9, 0.95]", "#optim-betas")
        await ready(pilot)


@driven
async def test_a_refused_value_that_goes_out_of_sight_blocks_nothing(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(STARTER + "[lora]\nr = 8\nlora_alpha = 16\n")
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await type_over(pilot, "[1", "#lora-lora_alpha")
        await until(pilot, lambda: "✗ the value is not valid TOML" in screen_text(pilot.app))
        await focus(pilot, "#train-method")
        await pilot.press("left")
        await ready(pilot)
        await press_until(pilot, "ctrl+s", lambda: "lora" not in written(tmp_path))


def test_a_file_is_as_it_was_where_nothing_changed_and_valid_where_something_did(tmp_path: Path):
    path = tmp_path / "rptrain.toml"
    for given in (STARTER.replace("\n", "\r\n").encode(), b"\xef\xbb\xbf" + STARTER.encode()):
        path.write_bytes(given)
        Draft.open(path).save()
        assert path.read_bytes() == given
    for text in ("[data]\ntrain = []\n", "data = {train = []}\n", "data.train = []\n"):
        draft = Draft(path, text)
        draft.put("data.train.0.path", "x.jsonl")
        assert tomllib.loads(draft.text) == {"data": {"train": [{"path": "x.jsonl"}]}}


@driven
async def test_a_question_is_asked_once(make: Made, tmp_path: Path):
    make_run(tmp_path / "runs", "old", end="finished", alive=False)
    app = make()
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        for place, key in (("f2", "f5"), ("f2", "ctrl+o"), ("f3", "e"), ("f3", "d")):
            await press_until(pilot, place, lambda place=place: (place == "f3") == ("✓ finished" in screen_text(app)))
            for _ in range(2):
                app.post_message(Key(key, None))
            await until(pilot, lambda: isinstance(app.screen, Dialog))
            await settled(pilot)
            await press_until(pilot, "escape", lambda: not isinstance(app.screen, Dialog))
            await settled(pilot)


@driven
async def test_samples_come_when_there_is_room_for_them(make: Made, helper: Scripted):
    async with make().run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        assert planning.preview not in [asked[0] for asked in helper.asked]
        await pilot.resize_terminal(200, 50)
        await until(pilot, lambda: "Two and two?" in screen_text(pilot.app))


@driven
async def test_samples_come_after_leaving_while_they_were_made(make: Made, helper: Scripted):
    call, go = helper.call, asyncio.Event()

    async def slow(function, *given):
        if function is planning.preview:
            await go.wait()
        return await call(function, *given)

    helper.call = slow
    async with make().run_test(size=(200, 50)) as pilot:
        await ready(pilot)
        await press_until(pilot, "f4", lambda: "✓ GPU" in screen_text(pilot.app))
        go.set()
        await press_until(pilot, "f2", lambda: "Two and two?" in screen_text(pilot.app))


@driven
async def test_a_file_with_something_else_in_a_table_s_place_can_be_edited(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text("optim = 1\n" + STARTER)
    async with make().run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: "Not ready" in screen_text(pilot.app))
        await type_over(pilot, "llama-3.1-8b", "#model-path")
        await until(pilot, lambda: shown(pilot.app, "train-max_steps") == [""])


@driven
async def test_a_line_that_is_typed_in_is_not_written_to(make: Made, tmp_path: Path):
    """What is done with one letter comes after the next one, where the machine is busy."""
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        late_write(pilot.app, "model-path", "llama-3.1-8b")
        late_write(pilot.app, "data-max_length", "77")
        pilot.app.screen.query_one(Form).post_message(Form.Edited())
        await until(pilot, lambda: shown(pilot.app, "optim-learning_rate") == ["1e-5"])
        assert shown(pilot.app, "model-path", "data-max_length") == ["llama-3.1-8b", "77"]
        late_write(pilot.app, "data-max_length", "78")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "max_length = 78" in written(tmp_path))
        assert 'path = "llama-3.1-8b"' in written(tmp_path)


@driven
async def test_another_model_brings_its_own_settings_but_not_over_ones_by_hand(make: Made):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await type_over(pilot, "8", "#train-global_batch_size")
        await type_over(pilot, "llama-3.1-8b", "#model-path")
        fields = ("data-max_length", "optim-learning_rate", "train-global_batch_size", "model-dtype")
        await until(pilot, lambda: shown(pilot.app, *fields) == ["128", "1e-5", "8", "bfloat16"])


@driven
async def test_adapters_bring_their_rows_and_take_them_away(make: Made, tmp_path: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        rank = next(row for row in pilot.app.screen.query(Row) if row.field.key == "lora.r")
        await focus(pilot, "#train-method")
        assert not rank.display
        await press_until(pilot, "right", lambda: rank.display)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: 'method = "lora"' in written(tmp_path))
        await press_until(pilot, "left", lambda: not rank.display)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "lora" not in written(tmp_path))


@driven
async def test_a_run_that_would_be_refused_is_not_called_fitting(make: Made, helper: Scripted):
    """The plan stands beside what refuses the run, and there is nothing to start."""
    refused = planned()
    refusals = [{"key": "data.train.0.path", "message": "my\x1b.jsonl: no such data file or folder"}]
    refused.report.update(fits=False, refusals=refusals, warnings=["2 of 90 rows are bad", "few steps"])
    refused.report["data_warnings"] = refused.report["warnings"][:1]
    helper.answers[planning.plan] = refused
    async with make().run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: "✗ cannot start" in screen_text(pilot.app))
        text = screen_text(pilot.app)
        assert "my␛.jsonl: no such data file" in text and "! 2 of 90 rows are bad" in text and "8.42 s" in text
        assert text.index("2 of 90 rows") < text.index("ctrl+t shows these rows") < text.index("! few steps")
        assert "1,200 steps       about 3.04 epochs" in text and "about 2 h 48 m in total" in text
        assert start_button(pilot.app).disabled and not pilot.app.screen.query_one("#advice").display
        assert "✗ my␛.jsonl: no such data" in text  # in the field itself, too


@driven
async def test_a_file_that_is_fixed_is_planned_again(make: Made, helper: Scripted, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("rptrain.tui.new_run.screen.WATCH_AFTER", 0.05)
    data = tmp_path / "chats.jsonl"
    data.write_text("{bad}")
    (tmp_path / "c.toml").write_text('[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "chats.jsonl"\n')
    refused = planned()
    refused.report.update(fits=False, refusals=[{"key": "data.train.0.path", "message": "1 of 1 rows are bad"}])
    helper.answers[planning.plan] = refused
    async with make(config=tmp_path / "c.toml").run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: "✗ cannot start" in screen_text(pilot.app))
        plans = [given[0] for given in helper.asked].count(planning.plan)
        helper.answers[planning.plan] = planned()
        await pilot.pause(0.3)
        assert [given[0] for given in helper.asked].count(planning.plan) == plans, "nothing was changed"
        data.write_text("{fix}")
        await ready(pilot)
        assert "cannot start" not in screen_text(pilot.app)


@pytest.mark.parametrize(
    ("fixed", "parts"),
    [
        (True, ("1,200 steps       about 3.04 epochs", "76,800 sequences  about 151 M tokens")),
        (False, ("about 1,200 steps  3.04 epochs", "about 76,800 sequences  about 151 M tokens")),
    ],
)
@driven
async def test_what_is_estimated_is_about_so_much(make: Made, helper: Scripted, fixed: bool, parts: tuple[str, str]):
    """The epochs if the steps are set, and the steps otherwise."""
    found = planned()
    found.report["length"]["fixed"] = fixed
    helper.answers[planning.plan] = found
    async with make().run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: all(f"│ {part}" in screen_text(pilot.app) for part in parts))


@driven
async def test_what_does_not_fit_is_not_started_and_advice_is_taken_by_a_key(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(launch, "COMMAND", ("false",))
    helper.answers[planning.plan] = planned(fits=False)
    async with make().run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "does not fit" in screen_text(pilot.app))
        assert start_button(pilot.app).disabled
        await pilot.click("#start")
        await pilot.press("ctrl+r")
        await settled(pilot)
        assert not isinstance(pilot.app.screen, RunScreen) and not (tmp_path / "runs").exists()
        helper.answers[planning.plan] = planned()
        advice = await focus(pilot, "#advice")
        assert isinstance(advice, OptionList)
        await press_until(pilot, "down", lambda: advice.highlighted == 1)
        await pilot.press("enter")
        await ready(pilot)
        assert "micro_batch_size = 1\n" in helper.asked[-1][2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("key", ["alt+1", "1"])
@driven
async def test_a_remedy_is_one_key(make: Made, helper: Scripted, key: str):
    """The number alone where nothing is typed."""
    helper.answers[planning.plan] = planned(fits=False)
    async with make().run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "alt+1 micro-batch = 1" in screen_text(pilot.app))
        await focus(pilot, "#model-path" if key == "alt+1" else "#train-method")
        helper.answers[planning.plan] = planned()
        await pilot.press(key)
        await ready(pilot)
        assert "micro_batch_size = 1\n" in helper.asked[-1][2] and shown(pilot.app, "model-path") == ["tiny-tasks"]
        await press_until(pilot, "alt+2", lambda: "✓ fits" in screen_text(pilot.app))  # there is none


@driven
async def test_alt_and_a_digit_as_terminals_send_them_change_no_value(make: Made, helper: Scripted):
    """Escape and the digit, which Textual reads as a character."""
    helper.answers[planning.plan] = planned(fits=False)
    async with make().run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "alt+1 micro-batch = 1" in screen_text(pilot.app))
        await focus(pilot, "#model-path")
        parser = XTermParser()
        for digit in range(9, 1, -1):
            for event in parser.feed(f"\x1b{digit}"):
                pilot.app.post_message(event)
        assert "alt+1 micro-batch = 1" in await settled(pilot), "there is only one change"
        helper.answers[planning.plan] = planned()
        for event in parser.feed("\x1b1"):
            pilot.app.post_message(event)
        await ready(pilot)
        assert "micro_batch_size = 1\n" in helper.asked[-1][2] and shown(pilot.app, "model-path") == ["tiny-tasks"]


@driven
async def test_the_changes_are_reached_without_alt(make: Made, helper: Scripted):
    helper.answers[planning.plan] = planned(fits=False)
    async with make().run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "What makes it fit (ctrl+g):" in screen_text(pilot.app))
        await focus(pilot, "#model-path")
        advice = pilot.app.screen.query_one("#advice", OptionList)
        await press_until(pilot, "ctrl+g", lambda: advice.has_focus and advice.highlighted == 1)
        helper.answers[planning.plan] = planned()
        await pilot.press("enter")
        await ready(pilot)
        assert "micro_batch_size = 1\n" in helper.asked[-1][2]


@driven
async def test_the_plan_shows_a_measured_speed_and_a_shorter_sequence(make: Made, helper: Scripted):
    found = planned()
    found.report["plan"]["past"] = {"run": "old[red]", "tokens_per_second": 23.0}
    found.report["length"].update(shorter=128, measured_seconds=9_000.0)
    helper.answers[planning.plan] = found
    async with make().run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: "23 tokens/s measured by the run old[red]" in screen_text(pilot.app))
        text = screen_text(pilot.app)
        assert "about 2 h 30 m in total as measured (planned: 2 h 48 m)" in text
        assert "samples have up to 61 tokens" in " ".join(screen_text(pilot.app).split())
        assert "alt+1 sequence length = 128" in screen_text(pilot.app)
        helper.answers[planning.plan] = planned()
        await press_until(pilot, "alt+1", lambda: shown(pilot.app, "data-max_length") == ["128"])
        await until(pilot, lambda: "alt+1" not in screen_text(pilot.app))


@driven
async def test_the_learning_rate_follows_the_size_of_a_model_of_ones_own(make: Made, helper: Scripted):
    async with make().run_test(size=(120, 36), notifications=True) as pilot:
        await ready(pilot)
        found = planned()
        found.report["model"]["parameters"] = 3_100_000
        helper.answers[planning.plan] = found
        await type_over(pilot, "own", "#model-path")
        await until(pilot, lambda: "The learning rate is 1e-3 now, and was 2e-3" in notified(pilot.app))
        await ready(pilot)
        assert shown(pilot.app, "optim-learning_rate") == ["1e-3"] and "learning_rate = 1e-3" in helper.asked[-1][2]


@driven
async def test_settings_are_found_by_the_words_of_other_trainers(make: Made):
    async with make().run_test(size=(120, 36)) as pilot:
        for typed, key in (
            ("lr", "optim-learning_rate"),
            ("grad clip", "optim-max_grad_norm"),
            ("gradient_accumulation_steps", "train-global_batch_size"),
            ("per_device_train_batch_size", "train-micro_batch_size"),
        ):
            await press_until(pilot, "f5", lambda: "All settings" in screen_text(pilot.app))
            await type_over(pilot, typed)
            await press_until(pilot, "enter", lambda key=key: getattr(pilot.app.focused, "id", "") == key)


def test_the_comment_behind_a_changed_value_is_dropped(tmp_path: Path):
    text = "# mine\n[train]\n# how long\nmax_steps = 20 # a minute\nseed = 1 # any\n"
    draft = Draft(tmp_path / "rptrain.toml", text)
    draft.put("train.max_steps", "20")
    assert draft.text == text
    draft.put("train.max_steps", "30")
    assert draft.text == text.replace("20 # a minute", "30")


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
        await until(pilot, lambda: "failed to start" in screen_text(pilot.app))
        said = 'said: 1 --config rptrain.toml save.resume=never log.run_name="tiny-tasks"'
        await until(pilot, lambda: said in screen_text(pilot.app))
        assert helper.closed == 1 and (tmp_path / "rptrain.toml").exists()


@driven
async def test_a_key_that_repeats_starts_one_trainer(make: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "echo begun >> begun", "trainer"))
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        for _ in range(2):
            pilot.app.post_message(Key("ctrl+r", None))
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await until(pilot, lambda: "failed to start" in screen_text(pilot.app))
    assert (tmp_path / "begun").read_text() == "begun\n"


@driven
async def test_models_and_data_are_chosen_from_lists(make: Made, helper: Scripted, tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text("{}\n")
    async with make().run_test(size=(100, 30)) as pilot:
        await ready(pilot)
        await focus(pilot, "#model-path")
        await press_until(pilot, "enter", lambda: "8.0 B  preset" in screen_text(pilot.app))
        await type_over(pilot, "llama")
        await press_until(pilot, "enter", lambda: shown(pilot.app, "model-path") == ["llama-3.1-8b"])
        await focus(pilot, "#data-train-0-path")
        await press_until(pilot, "enter", lambda: "chats.jsonl" in screen_text(pilot.app))
        await type_over(pilot, "chats")
        await until(pilot, lambda: "Two and two?" in screen_text(pilot.app))
        await press_until(pilot, "enter", lambda: shown(pilot.app, "data-train-0-path") == ["chats.jsonl"])
        await press_until(pilot, "enter", lambda: "Data on this machine" in screen_text(pilot.app))
        await press_until(pilot, "escape", lambda: "Data on this machine" not in screen_text(pilot.app))


@driven
async def test_a_new_run_takes_over_a_past_ones_settings(make: Made, tmp_path: Path):
    make_run(tmp_path / "runs", "old", model="qwen3-1.7b", end="finished", total=77)
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: "runs/old" in screen_text(pilot.app))
        await pilot.press("enter")
        await until(pilot, lambda: shown(pilot.app, "model-path", "train-max_steps") == ["qwen3-1.7b", "77"])
        await ready(pilot)


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
async def test_saving_writes_over_the_config_that_was_opened_and_over_no_other_file_unasked(make: Made, tmp_path: Path):
    path, beside = tmp_path / "rptrain.toml", tmp_path / "rptrain.toml.part"
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        path.write_text("# theirs\n")  # made by something else, after the interface found no file
        beside.write_text("# theirs too\n")
        await press_until(pilot, "ctrl+s", lambda: "Write over rptrain.toml?" in screen_text(pilot.app))
        await press_until(pilot, "n", lambda: "Write over" not in screen_text(pilot.app))
        assert path.read_text() == "# theirs\n"
        await press_until(pilot, "ctrl+s", lambda: "Write over rptrain.toml?" in screen_text(pilot.app))
        await press_until(pilot, "y", lambda: "saved to rptrain.toml" in notified(pilot.app))
        pilot.app._shown_until.clear()  # else an equal notice is not shown again
        await press_until(pilot, "ctrl+s", lambda: len(pilot.app._notifications) == 2)  # unasked
    assert "tiny-tasks" in path.read_text()
    assert beside.read_text() == "# theirs too\n" and {*tmp_path.glob("*toml*")} == {path, beside}


@driven
async def test_every_key_can_be_set(make: Made, tmp_path: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.press("f5")
        await until(pilot, lambda: "All settings" in screen_text(pilot.app))
        assert len(ALL) == len(keys())
        await type_over(pilot, "aux_loss")
        await until(pilot, lambda: "weight of the loss that balances experts" in screen_text(pilot.app))
        await press_until(pilot, "enter", lambda: getattr(pilot.app.focused, "id", "") == "train-router_aux_loss_coef")
        await type_over(pilot, "0.01", "#train-router_aux_loss_coef")
        await press_until(pilot, "f5", lambda: "All settings" in screen_text(pilot.app))
        await type_over(pilot, "learning_rate")
        await press_until(pilot, "enter", lambda: getattr(pilot.app.focused, "id", "") == "optim-learning_rate")
        await pilot.press("ctrl+s")
        await until(pilot, (tmp_path / "rptrain.toml").exists)
    config = resolve(tmp_path / "rptrain.toml").config
    assert config.train.router_aux_loss_coef == 0.01 and config.optim.learning_rate == 2e-3


@driven
async def test_what_a_config_sets_beside_the_form_is_shown(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(STARTER + "[optim]\neps = 1e-7\n[train]\nfreeze = ['*.0.*']\n")
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        assert shown(pilot.app, "optim-eps", "train-freeze") == ["1e-7", "['*.0.*']"]
        await type_over(pilot, "1e-6", "#optim-eps")
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
        if function in (planning.plan, machine.checks) and is_slow:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                ended.append(function.__name__)
                raise
        return await call(function, *given)

    helper.call = slow
    async with make().run_test(size=(80, 24)) as pilot:
        for key, word in (("f1", "between settings"), ("escape", "Length"), ("f4", "looking"), ("f1", "Everywhere")):
            await press_until(pilot, key, lambda word=word: word in screen_text(pilot.app))
        await until(pilot, lambda: ended == ["plan"])
        await press_until(pilot, "escape", lambda: "Everywhere" not in screen_text(pilot.app))
        assert ended == ["plan"]
        await pilot.press("f2")
        await until(pilot, lambda: ended == ["plan", "checks"])
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
        await focus(pilot, "#model-path")
        await press_until(pilot, "enter", lambda: "the helper process ended" in screen_text(pilot.app))
        await pilot.press("escape")
        await ready(pilot)


@driven
async def test_a_long_list_shows_a_part_and_finds_all(make: Made):
    async def find() -> list[Item]:
        return [Item(f"part-{number:05}[red]", "x") for number in range(20_000)]

    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        chosen: list[str | None] = []
        app.push_screen(Picker(Question("Many", find)), chosen.append)
        await until(pilot, lambda: "part-00000[red]" in screen_text(app))
        assert app.screen.query_one(OptionList).option_count == MAX_ITEMS + 1
        await until(pilot, lambda: isinstance(app.focused, Input))
        await pilot.press(*"19999", "enter")  # at once
        await until(pilot, lambda: chosen == ["part-19999[red]"])


@driven
async def test_enter_takes_what_is_typed_and_not_yet_looked_up(make: Made):
    async def find() -> list[Item]:
        return [Item("one", ""), Item("two", "")]

    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        chosen: list[str | None] = []
        app.push_screen(Picker(Question("Two", find)), chosen.append)
        await until(pilot, lambda: "two" in screen_text(app) and isinstance(app.focused, Input))
        typed = app.screen.query_one(Input)
        with typed.prevent(Input.Changed):
            typed.value = "two"
        await pilot.press("enter")
        await until(pilot, lambda: chosen == ["two"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("second", ["enter", "escape"])
@driven
async def test_of_two_keys_at_once_the_first_one_counts(make: Made, second: str):
    async def find() -> list[Item]:
        return [Item("one", "")]

    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        under = app.screen
        await focus(pilot, "#data-max_length")  # where the second key means little
        for dialog, answer in ((Picker(Question("One", find)), "one"), (Confirm("Sure?", "Do it"), False)):
            chosen: list[str | bool | None] = []
            app.push_screen(dialog, chosen.append)
            await until(pilot, lambda: ("one" in screen_text(app) or "Sure?" in screen_text(app)) and bool(app.focused))
            for key in ("enter", second):
                app.post_message(Key(key, None))
            await until(pilot, lambda chosen=chosen, answer=answer: chosen == [answer])
            await settled(pilot)
            assert under in app.screen_stack


@driven
async def test_a_button_that_is_pressed_twice_answers_once(make: Made):
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        chosen: list[bool | None] = []
        app.push_screen(Confirm("Sure?", "Do it"), chosen.append)
        await until(pilot, lambda: "Sure?" in screen_text(app))
        for _ in range(2):
            app.screen.query_one("#yes", Button).press()
        await until(pilot, lambda: chosen == [True])
        await settled(pilot)
        assert chosen == [True] and "tiny-tasks" in screen_text(app)


@driven
async def test_what_is_no_item_is_not_taken(make: Made):
    async def find() -> list[Item]:
        return [Item(f"part-{number:05}", "x") for number in range(MAX_ITEMS + 2)]

    async def fail() -> list[Item]:
        raise UserError("why it failed")

    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        chosen: list[str | None] = []
        app.push_screen(Picker(Question("Many", find)), chosen.append)
        await until(pilot, lambda: "part-00000" in screen_text(app))
        options = app.screen.query_one(OptionList)
        options.highlighted = MAX_ITEMS - 3
        await press_until(pilot, "pagedown", lambda: options.highlighted == MAX_ITEMS - 1)
        await press_until(pilot, "enter", lambda: chosen == [f"part-{MAX_ITEMS - 1:05}"])
        app.push_screen(Picker(Question("None", fail, paths=False)), chosen.append)
        await until(pilot, lambda: "why it failed" in screen_text(app) and isinstance(app.focused, Input))
        await pilot.press("x", "down", "enter")
        assert "why it failed" in await settled(pilot)
        assert len(chosen) == 1


@driven
async def test_the_mouse_does_what_keys_do(make: Made, tmp_path: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.click("#optim-update", offset=(11, 0))
        await until(pilot, lambda: shown(pilot.app, "optim-update") == ["sync"])
        await ready(pilot)
        await pilot.click("#save")
        await until(pilot, (tmp_path / "rptrain.toml").exists)
        assert 'update = "sync"' in (tmp_path / "rptrain.toml").read_text()


def test_real_plans_and_previews_are_values(tmp_path: Path):
    from rptrain.tui.new_run.recipe import recipe

    draft = Draft(tmp_path / "rptrain.toml")
    draft.update(recipe("tiny-tasks", "builtin:tasks", "full"))
    draft.put("engine.devices", "cpu:2")
    found = planning.plan(draft.path, draft.text)
    assert found.fits and found.report["plan"]["seconds_per_step"] > 0 and found.stages
    preview = planning.preview(draft.path, draft.text)
    assert [[part.supervised for part in sample.parts] for sample in preview.samples] == [[False, True]] * 3
    assert all("end" in sample.parts[1].text for sample in preview.samples)
    draft.put("data.train.0.path", "none.jsonl")
    with pytest.raises(UserError, match="no such data file"):
        planning.preview(draft.path, draft.text)
