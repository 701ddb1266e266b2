"""What holds everywhere: the ways between screens, help, the palette, looks, pictures, and leaving."""

import os
import signal
from pathlib import Path

import pytest
from textual.widgets import Input

from rptrain.tui.doctor import machine
from rptrain.tui.doctor.screen import Doctor
from rptrain.tui.new_run import planning
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.runs.screen import Runs
from rptrain.tui.services import preferences
from rptrain.tui.services.helper import HelperError
from rptrain.utils.errors import UserError

from .conftest import Made, Scripted, driven, notified, planned, press_until, screen_text, settled, type_over, until
from .recorded import BEGAN, make_run


@driven
async def test_keys_and_tabs_lead_everywhere(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs")
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        for key, kind in (("f2", NewRun), ("f3", Runs), ("f4", Doctor), ("f2", NewRun)):
            await pilot.press(key)
            await until(pilot, lambda kind=kind: isinstance(app.screen, kind))
        await pilot.click("Tab:last-of-type")
        await until(pilot, lambda: isinstance(app.screen, Doctor))


@pytest.mark.long
@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [(40, 24), (20, 5), (4, 60), (2, 60), (1, 1)])
@driven
async def test_a_terminal_may_be_small(make: Made, tmp_path: Path, size: tuple[int, int]):
    run = make_run(tmp_path / "runs")
    app = make(attach=run)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        for key in ("f2", "f3", "space", "enter", "f4", "f1"):
            await pilot.press(key)
            await settled(pilot)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "Everywhere" in screen_text(app))
        await pilot.press("escape", "f2")
        await until(pilot, lambda: "tiny-tasks" in screen_text(app))
        await pilot.resize_terminal(*size)
        await settled(pilot)


@pytest.mark.long
@driven
async def test_help_names_the_keys_of_the_screen(make: Made):
    async with make().run_test(size=(80, 24)) as pilot:
        for key, word in (("f2", "complete a path"), ("f3", "for comparison"), ("f4", "check again")):
            await pilot.press(key)
            await settled(pilot)
            await pilot.press("f1")
            await until(pilot, lambda word=word: word in screen_text(pilot.app))
            await press_until(pilot, "end", lambda: "ctrl+q" in screen_text(pilot.app))
            await pilot.press("escape")
            await until(pilot, lambda word=word: "save a picture" not in screen_text(pilot.app))
        await pilot.press("question_mark")
        await press_until(pilot, "end", lambda: "save a picture" in screen_text(pilot.app))


@driven
async def test_ctrl_c_says_how_to_leave(make: Made):
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.press("f3")
        await until(pilot, lambda: isinstance(pilot.app.screen, Runs))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "Press ctrl+q to leave; runs continue" in notified(pilot.app))
        assert "[b]" not in notified(pilot.app)


@pytest.mark.long
@driven
async def test_every_key_that_a_footer_names_is_explained(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs")
    async with make(attach=run).run_test(size=(200, 50)) as pilot:
        for key in ("", "f2", "f3", "f4"):
            await pilot.press(*([key] if key else []))
            await settled(pilot)
            explained = " ".join(keys for keys, _ in pilot.app.screen.KEYS)
            for binding in pilot.app.screen.BINDINGS:
                if binding.show and binding.action != "back":
                    shown = {
                        name.strip().replace("delete", "d").replace("slash", "/") for name in binding.key.split(",")
                    }
                    assert shown & set(explained.split()), (key, binding)


@pytest.mark.long
@driven
async def test_terms_that_a_newcomer_does_not_know_are_explained(make: Made, helper: Scripted, tmp_path: Path):
    helper.answers[planning.plan] = planned()
    make_run(tmp_path / "runs")
    make_run(tmp_path / "runs", "gone", alive=False, began=BEGAN - 60)
    shown = {
        "": ("bubble", "fused"),
        "f3": ("dead",),
        "enter": ("bubble", "of peak speed", "one step late", "queue", "used", "82%", "F0-7", "▀", "↑"),
    }
    async with make().run_test(size=(120, 60)) as pilot:
        for key, words in shown.items():
            await pilot.press(*([key] if key else []))
            await until(pilot, lambda words=words: all(word in screen_text(pilot.app) for word in words))
            explained = " ".join(term for term, _ in pilot.app.screen.KEYS)
            assert [word for word in words if word not in explained] == [], pilot.app.screen


@driven
async def test_a_run_is_shown_beside_a_config_that_is_broken(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs")
    (tmp_path / "rptrain.toml").write_text("[]\n")
    with pytest.raises(UserError, match="invalid TOML"):
        make()
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "▶ training" in screen_text(pilot.app))
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(pilot.app.screen, NewRun))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "Write over rptrain.toml?" in screen_text(pilot.app))
    assert (tmp_path / "rptrain.toml").read_text() == "[]\n"


@pytest.mark.long
@driven
async def test_the_palette_finds_commands(make: Made):
    async with make().run_test(size=(100, 30)) as pilot:
        await pilot.press("ctrl+p")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        await type_over(pilot, "doctor")
        await until(pilot, lambda: "What this machine has" in screen_text(pilot.app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, Doctor))


@driven
async def test_the_palette_has_the_keys_of_the_screen_and_no_others(make: Made, tmp_path: Path):
    app = make(attach=make_run(tmp_path / "runs"))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "training" in screen_text(app))
        named = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Pause", "Save", "Stop", "Replay", "Curves", "Runs", "Quit"} <= named
        assert not {name for name in named if "elected" in name or "ocus" in name}
        told = {command.title: command.help for command in app.get_system_commands(app.screen)}
        assert told["Stop"] == "save and stop, after a question (x)" and told["Search"] == "search the log (/)"
        await press_until(pilot, "f2", lambda: "✓ fits" in screen_text(app))
        told = {command.title: command.help for command in app.get_system_commands(app.screen)}
        assert told["Add data set"] == "add a data set (ctrl+n)" and "on this screen" not in " ".join(told.values())
        assert "Remedy" not in told and "Cancel the start" not in told


@pytest.mark.long
@driven
async def test_a_look_is_kept(make: Made, tmp_path: Path):
    settings = tmp_path / "settings" / "tui.toml"
    async with make().run_test(size=(80, 24)) as pilot:
        assert pilot.app.theme == "dark"
        await press_until(pilot, "f9", lambda: pilot.app.theme == "light")
    assert preferences.load(settings).look == "light"
    settings.write_text('# mine\nmodels = ["~/m"]\nlook = "light" # bright\n')
    async with make().run_test(size=(80, 24)) as pilot:
        assert pilot.app.theme == "light"
        await press_until(pilot, "f9", lambda: pilot.app.theme == "dark")
    assert settings.read_text() == '# mine\nmodels = ["~/m"]\nlook = "dark" # bright\n'


def test_preferences_that_say_something_else_are_refused(tmp_path: Path):
    path = tmp_path / "tui.toml"
    for text in ('look = "blue"', "color = 1", "look = ", "models = 3"):
        path.write_text(text)
        try:
            preferences.load(path)
        except UserError as error:
            assert str(path) in str(error)
        else:
            raise AssertionError(text)


@driven
async def test_a_picture_is_saved(make: Made, tmp_path: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await pilot.press("f8")
        await until(pilot, lambda: any(tmp_path.glob("*.svg")))
    assert "tiny-tasks" in next(tmp_path.glob("*.svg")).read_text()


@driven
async def test_leaving_ends_the_helper_alone(make: Made, helper: Scripted):
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.focused is not None)
        assert isinstance(app.focused, Input)
        await pilot.press("ctrl+q")
    assert helper.closed == 1


@driven
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_leaves_the_terminal_as_it_was(make: Made, kind: signal.Signals):
    app = make()
    async with app.run_test() as pilot:
        await settled(pilot)
        assert signal.getsignal(kind) not in (signal.SIG_DFL, signal.SIG_IGN)
        os.kill(os.getpid(), kind)
        await until(pilot, lambda: app.return_code is not None)
    assert app.return_code == 128 + kind


@driven
async def test_doctor(make: Made, helper: Scripted):
    async with make().run_test(size=(80, 24)) as pilot:
        await pilot.press("f4")
        await until(pilot, lambda: "ulimit -l unlimited" in screen_text(pilot.app))
        text = await settled(pilot)
        assert "✓ GPU" in text and "! page-locking" in text and "1 issue" in text
        helper.answers[machine.checks] = HelperError("the helper process ended")
        await pilot.press("r")
        await until(pilot, lambda: "the helper process ended" in screen_text(pilot.app))


@driven
async def test_an_output_folder_of_an_unknown_user_can_be_corrected(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text('[save]\noutput_dir = "~nosuchuser/runs"\n')
    async with make().run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "folder (save.output_dir) must" in screen_text(pilot.app))
