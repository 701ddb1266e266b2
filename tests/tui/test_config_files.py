"""New run: config files are opened, saved under another name, and not left with unsaved edits unasked."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from rptrain.cli import argv
from rptrain.config import recipes
from rptrain.config.resolve import resolve
from rptrain.tui.services.draft import STARTER

from ..run_tools import PATIENCE
from .conftest import Made, driven, notified, press_until, screen_text, settled, type_over, until
from .recorded import BEGAN, make_run

pytestmark = pytest.mark.long


@driven
async def test_another_file_is_opened_after_a_question_about_edits(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(STARTER)
    (tmp_path / "other.toml").write_text(STARTER + "[train]\nmax_steps = 77\n")
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        app = pilot.app
        await settled(pilot)
        await type_over(pilot, "3", "#train-max_steps")
        await until(pilot, lambda: "rptrain.toml *" in screen_text(app))
        for answer, steps in (("n", "3"), ("y", "77")):
            await press_until(pilot, "ctrl+o", lambda: "other.toml" in screen_text(app))
            await pilot.press(*"other", "enter")
            await until(pilot, lambda: "Leave rptrain.toml without saving?" in screen_text(app))
            await press_until(pilot, answer, lambda: "without saving" not in screen_text(app))
            await settled(pilot)
            assert app.screen.query_one("#train-max_steps").value == steps
        assert "other.toml" in screen_text(app).splitlines()[0]
        await press_until(pilot, "ctrl+o", lambda: "Open a config" in screen_text(app))
        await pilot.press(*"none.toml", "enter")
        await until(pilot, lambda: "none.toml does not exist" in notified(app))
    assert tomllib.loads((tmp_path / "rptrain.toml").read_text()) == tomllib.loads(STARTER)


@driven
async def test_a_recipe_fills_the_form_and_keeps_its_settings_with_another_model(make: Made, tmp_path: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await settled(pilot)
        await press_until(pilot, "ctrl+o", lambda: "qlora-8b" in screen_text(app))
        await pilot.press(*"qlora", "enter")
        await until(pilot, lambda: app.screen.query_one("#model-path").value == "Qwen/Qwen3-8B")
        assert "qlora-8b.toml" in screen_text(app).splitlines()[0] and not (tmp_path / "qlora-8b.toml").exists()
        await type_over(pilot, "llama-3.1-8b", "#model-path")
        await settled(pilot)
        config = resolve("qlora-8b.toml", (), recipes.text("qlora-8b")).config
        for section, key in (("lora", "r"), ("lora", "base"), ("train", "num_epochs"), ("save", "save_steps")):
            shown = app.screen.query_one(f"#{section}-{key}").value
            assert shown == format(getattr(getattr(config, section), key), "" if key == "base" else "g")


@driven
async def test_a_past_run_s_settings_replace_unsaved_edits_only_after_a_question(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(STARTER)
    make_run(tmp_path / "runs", "old", end="finished", alive=False, total=77)
    async with make().run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await settled(pilot)
        await type_over(pilot, "3", "#train-max_steps")
        await until(pilot, lambda: "rptrain.toml *" in screen_text(app))
        for answer, steps in (("n", "3"), ("y", "77")):
            await press_until(pilot, "f3", lambda: "✓ finished" in screen_text(app))
            await press_until(pilot, "n", lambda: "Leave rptrain.toml without saving?" in screen_text(app))
            await press_until(pilot, answer, lambda: "without saving" not in screen_text(app))
            await until(pilot, lambda steps=steps: app.screen.query_one("#train-max_steps").value == steps)


@driven
async def test_a_config_is_saved_under_another_name(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(STARTER)
    files = {"mine": "# mine\n", "copy": STARTER}
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    async with make().run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await settled(pilot)
        await type_over(pilot, "3", "#train-max_steps")
        for name, text in files.items():
            await press_until(pilot, "f6", lambda: "Save the config as" in screen_text(app))
            await type_over(pilot, name, "#name")
            await press_until(pilot, "enter", lambda name=name: f"Write over {name}.toml?" in screen_text(app))
            await press_until(pilot, "n", lambda: "Write over" not in screen_text(app))
            assert (tmp_path / f"{name}.toml").read_text() == text
            assert "rptrain.toml *" in screen_text(app).splitlines()[0]
        await press_until(pilot, "f6", lambda: "Save the config as" in screen_text(app))
        await type_over(pilot, "new", "#name")
        await press_until(pilot, "enter", (tmp_path / "new.toml").exists)
        await until(pilot, lambda: "new.toml" in screen_text(app).splitlines()[0])
    assert "max_steps = 3" in (tmp_path / "new.toml").read_text()
    assert (tmp_path / "rptrain.toml").read_text() == STARTER


@driven
async def test_an_invalid_value_that_is_saved_before_its_plan_is_named(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "rptrain.toml").write_text(STARTER)
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        await settled(pilot)
        monkeypatch.setattr("rptrain.tui.new_run.screen.PAUSE", 2.0 * PATIENCE)  # no plan is made from here on
        await type_over(pilot, "x", "#train-max_steps")
        await press_until(pilot, "ctrl+s", lambda: "saved to" in notified(pilot.app))
        assert "the value of max steps (train.max_steps) is invalid" in notified(pilot.app)


@driven
async def test_unsaved_edits_are_asked_about_before_quitting(make: Made, tmp_path: Path):
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await type_over(pilot, "3", "#train-max_steps")
        await until(pilot, lambda: app._shared.unsaved)
        await press_until(pilot, "ctrl+q", lambda: "Quit without saving rptrain.toml?" in screen_text(app))
        await press_until(pilot, "n", lambda: "Quit without" not in screen_text(app))
        await pilot.press("ctrl+s")
        await until(pilot, (tmp_path / "rptrain.toml").exists)
        await until(pilot, lambda: not app._shared.unsaved)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not app.is_running)


@pytest.mark.parametrize("filled", ["by the starter", "from a run"])
@driven
async def test_values_that_nobody_edited_are_left_unasked(make: Made, tmp_path: Path, filled: str):
    make_run(tmp_path / "runs", "old", end="finished", alive=False, total=77)
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        if filled == "from a run":
            await press_until(pilot, "f3", lambda: "✓ finished" in screen_text(app))
            await pilot.press("n")
            await until(pilot, lambda: [row.value for row in app.screen.query("#train-max_steps")] == ["77"])
            await settled(pilot)
        assert "rptrain.toml (new)" in screen_text(app)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not app.is_running)


@driven
async def test_unsaved_settings_of_a_past_run_leave_their_file_name_to_those_of_the_next(make: Made, tmp_path: Path):
    for number, name in enumerate(("old", "older")):
        make_run(tmp_path / "runs", name, end="finished", alive=False, total=77 - number, began=BEGAN - 60 * number)
    (tmp_path / "rptrain.toml").write_text(STARTER)
    (tmp_path / "older-2.toml").symlink_to("gone.toml")
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        for keys, title in (((), "old-2.toml (new)"), (("down",), "older-2-2.toml (new)")):
            await press_until(pilot, "f3", lambda: "✓ finished" in screen_text(app))
            await pilot.press(*keys, "n")
            await until(pilot, lambda title=title: title in screen_text(app).splitlines()[0])
        await press_until(pilot, "ctrl+s", (tmp_path / "older-2-2.toml").exists)
    assert "max_steps = 76" in (tmp_path / "older-2-2.toml").read_text()
    assert sorted(path.name for path in tmp_path.glob("*.toml")) == ["older-2-2.toml", "older-2.toml", "rptrain.toml"]


@driven
async def test_settings_of_a_past_run_are_shown_from_the_first_one_and_as_not_saved(make: Made, tmp_path: Path):
    """The form was scrolled to its end. The config file that is there keeps its content."""
    make_run(tmp_path / "runs", "old", end="finished", alive=False, total=77)
    (tmp_path / "rptrain.toml").write_text(STARTER)
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await press_until(pilot, "ctrl+end", lambda: "Evaluation" in screen_text(app))
        await press_until(pilot, "f3", lambda: "✓ finished" in screen_text(app))
        await pilot.press("n")
        await until(pilot, lambda: app.focused is not None and app.focused.id == "model-path")
        text = await settled(pilot)
        assert "Model and data" in text and "old-2.toml (new)" in text and "model (model.path): " in text
        await pilot.press("ctrl+s")
        await until(pilot, (tmp_path / "old-2.toml").exists)
    assert (tmp_path / "rptrain.toml").read_text() == STARTER
    assert "max_steps = 77" in (tmp_path / "old-2.toml").read_text()


def test_a_config_file_alone_is_opened_in_a_terminal_and_trained_elsewhere(monkeypatch: pytest.MonkeyPatch):
    for terminal, opened in ((True, ["open", "my.toml"]), (False, ["train", "--config", "my.toml"])):
        monkeypatch.setattr(
            import_module("rptrain.cli.argv"), "is_terminal", lambda stream, terminal=terminal: terminal
        )
        assert argv.arguments(["my.toml"]) == opened
        assert argv.arguments(["my.toml", "a=1"]) == ["train", "--config", "my.toml", "a=1"]
        assert argv.arguments(["path=a.toml"]) == ["train", "path=a.toml"]
