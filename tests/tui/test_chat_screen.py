"""The Chat screen: from a run and from the list, with a process that stands for the model, and once with a model."""

import shutil
import sys
from pathlib import Path

import pytest
from textual.widgets import Input, OptionList

from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.records.lanes import Snapshot
from rptrain.tui.chat import session as chat_session
from rptrain.tui.chat.exchange import Exchange
from rptrain.tui.chat.screen import ChatScreen
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.runs.run_list import RunList
from rptrain.tui.runs.screen import Runs
from rptrain.tui.services import launch

from .. import run_tools as tools
from .conftest import Made, driven, focus, notified, press_until, screen_text, settled, type_over, until
from .recorded import BEGAN, make_run
from .test_chat_session import DOUBLE

pytestmark = pytest.mark.long


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(chat_session, "COMMAND", DOUBLE)
    monkeypatch.setattr("rptrain.tui.chat.screen.PAUSE", 0.02)
    run = make_run(tmp_path / "runs", "done", steps=50, total=50, end="finished", alive=False, began=BEGAN)
    for step in (20, 40):
        tools.write_checkpoint(run / "checkpoints" / f"checkpoint-{step}")
    return run


async def opened(pilot) -> ChatScreen:
    """From the list of runs, with one key."""
    await pilot.press("f3")
    await until(pilot, lambda: "✓ finished" in screen_text(pilot.app))
    await pilot.press("c")
    await until(pilot, lambda: "1,234 tokens/s expected" in screen_text(pilot.app))
    screen = pilot.app.screen
    assert isinstance(screen, ChatScreen) and pilot.app.focused.id == "message"
    return screen


async def say(pilot, said: str, shown: str) -> None:
    await type_over(pilot, said, "#message")
    await press_until(pilot, "enter", lambda: shown in screen_text(pilot.app))


@driven
async def test_a_conversation_by_keys(make: Made, run: Path):
    async with make(attach=run).run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: "finished after 50" in screen_text(pilot.app))
        await pilot.press("c")
        await until(pilot, lambda: "process 300 MiB" in screen_text(pilot.app))
        await say(pilot, "one two", "ONE TWO")
        speeds = "on the CPU: 1,234 tokens/s expected 12 tokens/s measured"
        await until(pilot, lambda: speeds in " ".join(screen_text(pilot.app).split()))
        assert "earlier messages are included" not in await settled(pilot)
        await say(pilot, "three", "THREE")
        assert "earlier messages are included; ctrl+n starts a new conversation" in await settled(pilot)
        assert "answers: tuned model" in screen_text(pilot.app) and "^b base: off" in screen_text(pilot.app)
        await press_until(pilot, "ctrl+b", lambda: "answers: tuned and base model" in screen_text(pilot.app))
        assert "^b base: on" in await settled(pilot)
        assert "ctrl+r asks both models again." in await settled(pilot)
        await press_until(pilot, "ctrl+r", lambda: "[three]" in screen_text(pilot.app))
        assert "ctrl+r asks" not in await settled(pilot)
        assert screen_text(pilot.app).count("> three") == 1
        await press_until(pilot, "up", lambda: pilot.app.screen.query_one("#message", Input).value == "three")
        await until(pilot, lambda: "THREE" not in screen_text(pilot.app))
        await press_until(pilot, "ctrl+n", lambda: "ONE TWO" not in screen_text(pilot.app))
        await press_until(pilot, "up", lambda: pilot.app.screen.query_one("#message", Input).value == "three")
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, RunScreen))


@driven
async def test_escape_stops_an_answer_before_it_leaves_and_the_model_stays_loaded(make: Made, run: Path):
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        screen = await opened(pilot)
        await say(pilot, "wait", "WAIT  …")
        await type_over(pilot, "more", "#message")
        await press_until(pilot, "enter", lambda: "esc stops the answer" in notified(pilot.app))
        await press_until(pilot, "escape", lambda: "WAIT  (stopped)" in screen_text(pilot.app))
        assert pilot.app.screen is screen and screen.query_one("#message", Input).value == "more"
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        process = screen._session._process
        await pilot.press("c")
        await until(pilot, lambda: "WAIT  (stopped)" in screen_text(pilot.app))
        assert isinstance(pilot.app.screen, ChatScreen) and pilot.app.screen._session._process is process
        await press_until(pilot, "f3", lambda: isinstance(pilot.app.screen, Runs))
    assert process is not None and process.returncode is not None, "it ends with the interface"


@driven
async def test_a_message_waits_for_the_model(make: Made, run: Path):
    (run / "slow").touch()
    async with make(attach=run).run_test(size=(80, 24), notifications=True) as pilot:
        app = pilot.app
        await until(pilot, lambda: "finished after 50" in screen_text(app))
        await pilot.press("c")
        await until(pilot, lambda: "runs/done/checkpoints/checkpoint-40: loading, " in screen_text(app))
        message = app.screen.query_one("#message", Input)
        await say(pilot, "one two", "> one two\n waits for the model")
        await type_over(pilot, "three", "#message")
        await press_until(pilot, "enter", lambda: "a message waits for the model already" in notified(app))
        await press_until(pilot, "ctrl+n", lambda: "one two" not in screen_text(app) and message.value == "")
        await until(pilot, lambda: not notified(app))
        await press_until(pilot, "up", lambda: message.value == "")
        await say(pilot, "four", "> four\n waits for the model")
        await press_until(pilot, "up", lambda: message.value == "four" and "waits" not in screen_text(app))
        await press_until(pilot, "enter", lambda: "> four\n waits" in screen_text(app))
        await press_until(pilot, "ctrl+b", lambda: "base: on" in screen_text(app))
        (run / "slow").unlink()
        await until(pilot, lambda: "tuned  FOUR" in screen_text(app) and "base   [four]" in screen_text(app))
        assert "ONE TWO" not in screen_text(app) and message.value == ""


@driven
async def test_a_new_conversation_during_an_answer(make: Made, run: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await say(pilot, "wait", "WAIT  …")
        await press_until(pilot, "ctrl+b", lambda: "base: on" in screen_text(pilot.app))
        assert "base   " not in screen_text(pilot.app), "from the next message on"
        await type_over(pilot, "half", "#message")
        await press_until(pilot, "ctrl+n", lambda: "WAIT" not in screen_text(pilot.app))
        assert pilot.app.screen.query_one("#message", Input).value == ""
        await say(pilot, "next", "base   [next]")
        assert "WAIT" not in screen_text(pilot.app) and "tuned  NEXT" in screen_text(pilot.app)


@driven
async def test_empty_answers_are_named(make: Made, run: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await say(pilot, "nothing", "> nothing\n (empty answer)")
        await press_until(pilot, "ctrl+b", lambda: "base: on" in screen_text(pilot.app))
        await press_until(pilot, "ctrl+r", lambda: "base   (empty answer)" in screen_text(pilot.app))
        assert "tuned  (empty answer)" in screen_text(pilot.app)


@driven
async def test_a_run_is_the_same_by_another_path(make: Made, run: Path):
    """Opened by an absolute path, and then from the list, which has relative ones."""
    assert run.is_absolute()
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "finished after 50" in screen_text(pilot.app))
        await press_until(pilot, "c", lambda: "1,234 tokens/s" in screen_text(pilot.app))
        await say(pilot, "one two", "ONE TWO")
        await opened(pilot)
        assert "ONE TWO" in screen_text(pilot.app)


@driven
async def test_settings(make: Made, run: Path):
    async with make().run_test(size=(120, 36), notifications=True) as pilot:
        screen = await opened(pilot)
        await type_over(pilot, "hot", "#temperature")
        await press_until(pilot, "enter", lambda: pilot.app.focused.id == "message")
        await type_over(pilot, "a", "#message")
        await press_until(pilot, "enter", lambda: "temperature must be a number" in notified(pilot.app))
        assert pilot.app.focused.id == "temperature" and not screen._session.turns
        await type_over(pilot, "0", "#temperature")
        await type_over(pilot, "1.5", "#top-p")
        await focus(pilot, "#message")
        await press_until(pilot, "enter", lambda: "top-p must be above 0 and at most 1" in notified(pilot.app))
        await type_over(pilot, "1", "#top-p")
        await type_over(pilot, "Be brief.", "#system")
        await focus(pilot, "#message")
        await press_until(pilot, "enter", lambda: bool(screen._session.turns))
        settings = screen._session.settings
        assert (settings.answers.temperature, settings.answers.top_p, settings.system) == (0.0, 1.0, "Be brief.")


@driven
async def test_a_process_that_ends_and_a_message_that_is_refused(make: Made, run: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await say(pilot, "first", "FIRST")
        await say(pilot, "refuse", "too ␛[1mlong")
        assert len(pilot.app.screen.query(Exchange)) == 1
        assert pilot.app.screen.query_one("#message", Input).value == "refuse", "it can be corrected"
        await say(pilot, "die", "ended with status 3: RuntimeError")
        assert "ctrl+r loads the model again; the conversation is kept." in screen_text(pilot.app)
        await press_until(pilot, "ctrl+r", lambda: "1,234 tokens/s" in screen_text(pilot.app))
        await say(pilot, "second", "SECOND")
        assert "FIRST" in screen_text(pilot.app)


@driven
async def test_a_training_gets_the_memory_of_the_model(make: Made, run: Path, monkeypatch: pytest.MonkeyPatch):
    """The model is loaded again once the conversation is opened, but while the trainer runs only if it is asked for."""
    make_run(run.parent, "stopped", steps=20, end="stopped", alive=False, began=BEGAN - 1000)
    trainer = f"until test -e {run.parent}/over; do sleep 0.1; done; false"
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", trainer))
    async with make().run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        await say(pilot, "first", "FIRST")
        await press_until(pilot, "ctrl+g", lambda: "cpu       1,234 tokens/s" in screen_text(pilot.app))
        await pilot.press("down")
        await press_until(pilot, "enter", lambda: "on the GPU" in screen_text(pilot.app))
        await until(pilot, lambda: screen._session.state == "idle")
        process = screen._session._process
        assert process is not None
        await type_over(pilot, "half a mess", "#message")
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        runs = pilot.app.screen.query_one(RunList)
        await press_until(pilot, "down", lambda: runs.chosen is not None and runs.chosen.path.name == "stopped")
        await press_until(pilot, "r", lambda: isinstance(pilot.app.screen, RunScreen))
        assert process.returncode is not None and screen._session.state == "ended"
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        runs = pilot.app.screen.query_one(RunList)
        await press_until(pilot, "home", lambda: runs.chosen is not None and runs.chosen.path.name == "done")
        await press_until(pilot, "c", lambda: "FIRST" in screen_text(pilot.app))
        assert "needs the memory" in await settled(pilot), "the trainer has no records yet"
        assert pilot.app.screen.query_one("#message", Input).value == "half a mess"
        await press_until(pilot, "ctrl+r", lambda: "checkpoint-40 on the CPU" in screen_text(pilot.app))
        await until(pilot, lambda: "needs the memory" not in screen_text(pilot.app))
        process = screen._session._process
        assert process is not None
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        process.kill()
        await until(pilot, lambda: screen._session.state == "ended")
        (run.parent / "over").touch()
        await until(pilot, lambda: not pilot.app._shared.training())
        await press_until(pilot, "c", lambda: "1,234 tokens/s expected" in screen_text(pilot.app))
        assert "FIRST" in screen_text(pilot.app)


@driven
async def test_a_model_is_not_loaded_while_a_training_starts(make: Made, run: Path, monkeypatch: pytest.MonkeyPatch):
    """Also when its conversation is opened for the first time: the trainer takes its memory before its first step."""
    stopped = make_run(run.parent, "stopped", steps=20, end="stopped", alive=False, began=BEGAN - 1000)
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "sleep 60"))
    async with make().run_test(size=(80, 24)) as pilot:
        shared = pilot.app._shared
        launched = await shared.resume(stopped)
        await pilot.press("f3")
        await until(pilot, lambda: "✓ finished" in screen_text(pilot.app))
        await press_until(pilot, "c", lambda: "stopped is starting and needs memory" in screen_text(pilot.app))
        assert shared.chat._process is None and "ctrl+r loads the model.\n" in screen_text(pilot.app)
        await press_until(pilot, "ctrl+r", lambda: "1,234 tokens/s expected" in screen_text(pilot.app))
        assert "(stopped trains on this machine)" in screen_text(pilot.app), "which takes the CPU"
        assert shared.starting() == "stopped"
        with (stopped / "lanes.jsonl").open("a") as lanes:
            print(Snapshot(launched.began + 1, 0.25, "loading", 0, 0, (), None).to_line(), file=lanes, flush=True)
            assert shared.starting() == "stopped"
            print(Snapshot(launched.began + 2, 0.25, "training", 0, 0, (), None).to_line(), file=lanes)
        assert not shared.starting() and shared.training() == "stopped"
        launched.process.kill()
        launched.process.wait()


@driven
async def test_a_training_that_cannot_be_started_leaves_the_model(make: Made, run: Path):
    make_run(run.parent, "stopped", steps=20, end="stopped", alive=False, began=BEGAN - 1000)
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        screen = await opened(pilot)
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        runs = pilot.app.screen.query_one(RunList)
        await press_until(pilot, "down", lambda: runs.chosen is not None and runs.chosen.path.name == "stopped")
        with EventLog(run.parent / "stopped/events.jsonl"):
            await press_until(pilot, "r", lambda: "another process is training this run" in notified(pilot.app))
        assert screen._session.state == "idle"


@driven
async def test_the_checkpoint_and_the_placement_are_chosen(make: Made, run: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        await say(pilot, "first", "FIRST")
        process = screen._session._process
        await press_until(pilot, "ctrl+o", lambda: "Which model should answer" in screen_text(pilot.app))
        assert "runs/done/checkpoints/checkpoint-20" in screen_text(pilot.app)
        await press_until(pilot, "enter", lambda: pilot.app.screen is screen)
        assert screen._session._process is process, "the model that answers is not loaded again"
        await press_until(pilot, "ctrl+o", lambda: "Which model should answer" in screen_text(pilot.app))
        await pilot.press("down")
        await press_until(pilot, "enter", lambda: pilot.app.screen is screen)
        await until(pilot, lambda: "checkpoints/checkpoint-20 on the CPU" in screen_text(pilot.app))
        assert "FIRST" in screen_text(pilot.app), "the conversation is kept"
        await press_until(pilot, "ctrl+g", lambda: "gpu       5,678 tokens/s, weights in" in screen_text(pilot.app))
        assert "cpu       1,234 tokens/s" in screen_text(pilot.app)
        options = pilot.app.screen.query_one(OptionList)
        assert [options.get_option_at_index(index).disabled for index in range(4)] == [False, False, True, False]
        await press_until(pilot, "down", lambda: options.highlighted == 1)
        await press_until(pilot, "enter", lambda: "checkpoints/checkpoint-20 on the GPU" in screen_text(pilot.app))
        await press_until(pilot, "ctrl+o", lambda: "Which model should answer" in screen_text(pilot.app))
        await press_until(pilot, "escape", lambda: pilot.app.screen is screen)
        assert "checkpoint-20 on the GPU" in await settled(pilot)


@driven
async def test_models_of_other_runs_continue_the_conversation_and_its_last_message_is_repeated(make: Made, run: Path):
    other = make_run(run.parent, "other", steps=9, end="finished", alive=False, began=BEGAN - 1000)
    tools.write_checkpoint(other / "checkpoints/checkpoint-9")
    async with make().run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot)
        await say(pilot, "first", "FIRST")
        await press_until(pilot, "ctrl+o", lambda: "runs/other/checkpoints/checkpoint-9" in screen_text(pilot.app))
        await pilot.press("end")
        await press_until(pilot, "enter", lambda: pilot.app.screen is screen)
        await until(pilot, lambda: "runs/other/checkpoints/checkpoint-9 on the CPU" in screen_text(pilot.app))
        assert "FIRST" in screen_text(pilot.app) and screen_text(pilot.app).splitlines()[0].endswith("runs/other")
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        runs = pilot.app.screen.query_one(RunList)
        await press_until(pilot, "down", lambda: runs.chosen is not None and runs.chosen.path.name == "other")
        await press_until(pilot, "c", lambda: isinstance(pilot.app.screen, ChatScreen))
        await until(pilot, lambda: "checkpoints/checkpoint-9 on the CPU" in screen_text(pilot.app))
        assert "FIRST" not in screen_text(pilot.app)
        await press_until(pilot, "up", lambda: pilot.app.screen.query_one("#message", Input).value == "first")


@driven
async def test_the_model_that_answers_is_the_one_that_the_run_has_now(make: Made, run: Path):
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        screen = await opened(pilot)
        await say(pilot, "first", "FIRST")
        assert "checkpoints/checkpoint-40 on the CPU" in screen_text(pilot.app)
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        (run / "model").mkdir()
        (run / "model/config.json").touch()
        screen = await opened(pilot)
        await until(pilot, lambda: "model on the CPU" in screen_text(pilot.app))
        assert "the result of the run is now done/model" in notified(pilot.app) and "FIRST" in screen_text(pilot.app)
        await press_until(pilot, "ctrl+o", lambda: "runs/done/model (result, step 50)" in screen_text(pilot.app))
        await pilot.press("down")
        await press_until(pilot, "enter", lambda: pilot.app.screen is screen)
        await until(pilot, lambda: "checkpoints/checkpoint-40 on the CPU" in screen_text(pilot.app))
        await say(pilot, "second", "SECOND")
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        process = screen._session._process
        await opened(pilot)
        assert screen._session._process is process, "the checkpoint was chosen"
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        shutil.rmtree(run / "checkpoints/checkpoint-40")
        await opened(pilot)
        await until(pilot, lambda: "model on the CPU" in screen_text(pilot.app))
        assert "checkpoint-40 was deleted: done/model answers" in notified(pilot.app)
        assert "SECOND" in screen_text(pilot.app)


@driven
async def test_a_model_of_ones_own(make: Made, tmp_path: Path):
    """The real process, with a model of random weights."""
    assert chat_session.COMMAND[0] == sys.executable
    tools.write_model(tmp_path / "runs/own/model")
    (tmp_path / "runs/own/config.toml").write_text('[model]\npath = "tiny-tasks"\n')
    (expected,) = tools.generated(tmp_path / "runs/own", ["Sort: 321"], 1024, 0.0, 0, False)
    async with make(attach=tmp_path / "runs/own").run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: pilot.app.screen.check_action("chat", ()) is True)
        await pilot.press("c")
        await until(pilot, lambda: "model on the CPU" in screen_text(pilot.app))
        await type_over(pilot, "0", "#temperature")
        await type_over(pilot, "Sort: 321", "#message")
        session = pilot.app.screen._session  # type: ignore[attr-defined]
        await press_until(pilot, "enter", lambda: session.state == "idle" and session.turns)
        assert session.turns[0].answer == expected and session.host > 100 << 20
