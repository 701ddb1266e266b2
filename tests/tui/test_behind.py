"""What the screens stand on: drafts, recipes, places, the helper process, launching, replays, curves."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from rptrain.config.resolve import render, resolve
from rptrain.runs.folder import control
from rptrain.tui import start
from rptrain.tui.context import Context
from rptrain.tui.new_run import places
from rptrain.tui.new_run.recipe import EXAMPLE, recipe
from rptrain.tui.run.replay import Replay
from rptrain.tui.services import launch
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.fields import ALL, FIELDS
from rptrain.tui.services.helper import ChildHelper, HelperError
from rptrain.tui.services.paths import complete
from rptrain.tui.services.preferences import Preferences
from rptrain.tui.widgets.plot import Canvas
from rptrain.utils.errors import UserError

from .. import run_tools as tools
from ..run_tools import PATIENCE
from .conftest import wait_for
from .recorded import make_run

ROOT = Path(__file__).parents[2]


# Drafts


def test_a_changed_value_keeps_all_else_and_every_comment_that_is_not_behind_it(tmp_path: Path):
    text = (ROOT / "rptrain.toml").read_text()
    path = tmp_path / "rptrain.toml"
    path.write_text(text)
    draft = Draft.open(path)
    draft.update({"optim.learning_rate": "3e-4", "data.packing": "false", "data.train.0.path": "a b.jsonl"})
    draft.put("train.max_steps", "")
    draft.put("engine.vram_limit", "24GiB")
    draft.save()
    before, after = text.splitlines(), path.read_text().splitlines()
    assert [line for line in before if line not in after] == [
        line for line in before if line.startswith(("learning_rate", "packing", 'path = "builtin', "max_steps"))
    ]
    assert [line for line in after if line not in before] == [
        'path = "a b.jsonl"',
        "packing = false",
        "learning_rate = 3e-4",
        'vram_limit = "24GiB"',
    ]
    assert resolve(path).config.engine.vram_limit == 24 << 30


def test_the_lora_table_goes_and_comes_back(tmp_path: Path):
    draft = Draft(tmp_path / "c.toml")
    draft.update({"train.method": "lora", "lora.r": "16"})
    draft.put("train.method", "full")
    assert draft.resolved().config.adapters is None and not draft.has("lora")
    draft.put("train.method", "lora")
    assert draft.shown("lora.r") == "16"


def test_names_are_text_whatever_they_look_like(tmp_path: Path):
    draft = Draft(tmp_path / "c.toml")
    draft.update({"log.run_name": "1", "model.path": "3e5"})
    assert draft.resolved().config.log.run_name == "1" and draft.shown("model.path") == "3e5"


def test_what_a_draft_cannot_be_is_said(tmp_path: Path):
    with pytest.raises(UserError, match="invalid TOML"):
        Draft(tmp_path / "c.toml", "a = ")
    with pytest.raises(UserError, match="edit it by hand"):
        Draft(tmp_path / "c.toml", "optim = 3\n").put("optim.eps", "1e-6")
    with pytest.raises(UserError, match="is not valid TOML"):
        Draft(tmp_path / "c.toml").put("optim.betas", "[1, ")
    with pytest.raises(UserError, match="cannot be written"):
        Draft(tmp_path / "none" / "c.toml").save()


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("data", ["builtin:tasks", "chats.jsonl"])
@pytest.mark.parametrize("model", ["tiny-tasks", "/models/Llama 8B"])
def test_every_recipe_is_a_config(tmp_path: Path, model: str, data: str, method: str):
    draft = Draft(tmp_path / "c.toml")
    draft.update({"model.path": model, "data.train.0.path": data, "train.method": method})
    draft.update(recipe(model, data, method))
    config = draft.resolved().config
    assert config.log.run_name and (config.adapters is not None) == (method == "lora")


def test_the_example_s_recipe_is_the_bundled_config(tmp_path: Path):
    draft = Draft.open(ROOT / "rptrain.toml")
    assert {key: draft.shown(key) for key in EXAMPLE} == EXAMPLE


def test_every_field_is_a_key_with_its_words():
    for field in FIELDS:
        assert field.about and 0 < len(field.label) <= 15  # what a row has room for
    assert ALL["log.report_to"].options == () and ALL["optim.moments"].options == ("fp32", "bf16", "int8")
    assert all(ALL[field.key] is field for field in FIELDS) and "data.val.0.path" in ALL


def test_a_draft_becomes_a_past_config_and_keeps_comments(tmp_path: Path):
    """What the run did not set goes, its own settings come, of data sets too; defaults are not written out."""
    path = tmp_path / "rptrain.toml"
    path.write_text((ROOT / "rptrain.toml").read_text() + "\n[lora]\nr = 4 # small\n")
    draft = Draft.open(path)
    draft.put("data.train.1.path", "more")
    draft.put("train.num_epochs", "3")
    past = Draft(tmp_path / "past.toml")
    past.update({"model.path": "qwen3-1.7b", "data.train.0.path": "a b.jsonl", "train.num_epochs": "2.0"})
    past.update({"data.val.0.path": "v.jsonl", "optim.betas": "0.8, 0.9", "train.micro_batch_size": "4"})
    (tmp_path / "config.toml").write_text(render(past.resolved()))
    config = resolve(tmp_path / "config.toml").config
    draft.become(config)
    assert draft.resolved().config == config
    assert set(draft.set_keys()) == {*past.set_keys(), "log.run_name"}
    assert "# default" not in draft.text and "micro_batch_size = 4 #" in draft.text
    past.put("train.method", "lora")
    draft.become(past.resolved().config)
    assert draft.shown("train.method") == "lora" and draft.resolved().config.adapters is not None
    for text in ("model = 3\n", draft.text + '[[data.train]]\npath = "z"\n', 'data = [1]\n[[train]]\npath = "x"\n'):
        odd = Draft(path, text)
        odd.become(config)
        assert odd.resolved().config == config


def test_a_list_is_typed_without_its_brackets(tmp_path: Path):
    draft = Draft(tmp_path / "c.toml")
    draft.update({"log.report_to": "tensorboard, wandb", "optim.betas": "[0.8, 0.9]"})
    config = draft.resolved().config
    assert config.log.report_to == ("tensorboard", "wandb") and config.optim.betas == (0.8, 0.9)


def test_a_file_keeps_its_mode_and_its_link_and_a_change_from_outside_is_seen(tmp_path: Path):
    (tmp_path / "real.toml").touch(0o600)
    path = tmp_path / "rptrain.toml"
    path.symlink_to(tmp_path / "real.toml")
    draft = Draft.open(path)
    draft.put("train.seed", "3")
    assert draft.is_changed and not draft.is_changed_outside
    draft.save()
    assert path.is_symlink() and (tmp_path / "real.toml").stat().st_mode & 0o777 == 0o600
    assert not draft.is_changed and not draft.is_changed_outside
    path.write_text("[train]\n")
    assert draft.is_changed_outside
    path.unlink()
    assert not draft.is_changed_outside


# Places


def test_models_and_data_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    tiny = ROOT / "models" / "presets" / "tiny-tasks" / "config.json"
    for folder in ("a/mine", "hub/models--org--name/snapshots/1"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(tiny.read_text())
    (tmp_path / "a" / "odd").mkdir()
    (tmp_path / "a" / "odd" / "config.json").write_text('{"architectures": ["Odd"]}')
    for name in ("chats.jsonl", "rows.parquet", "TABLE.CSV", "weights.bin"):
        (tmp_path / "a" / name).write_text("{}\n")
    (tmp_path / "a" / "mine" / "notes.txt").write_text("no data\n")
    (tmp_path / "a" / ".hidden").mkdir()
    (tmp_path / "a" / ".hidden" / "x.jsonl").write_text("{}\n")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "nowhere.jsonl").symlink_to(tmp_path / "a" / "nowhere.jsonl")  # an error to look at
    found = {model.path: model for model in places.models([str(tmp_path / "a"), str(tmp_path / "none")])}
    assert found["tiny-tasks"].weights and not found["qwen3-32b"].weights
    assert found["org/name"].source == "hub cache" and found["org/name"].parameters > 400_000
    assert found[str(tmp_path / "a/mine")].parameters > 400_000
    assert found[str(tmp_path / "a/odd")].parameters == 0 and "Odd" in found[str(tmp_path / "a/odd")].about
    data = {Path(file.path).name for file in places.data([str(tmp_path / "a")])[2:]}
    assert data == {"chats.jsonl", "rows.parquet", "TABLE.CSV"}


def test_own_models_come_before_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    tiny = ROOT / "models" / "presets" / "tiny-tasks" / "config.json"
    elsewhere = tmp_path / "others" / "theirs"
    for folder in (tmp_path / "models" / "mine", elsewhere):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(tiny.read_text())
    monkeypatch.chdir(tmp_path / "models")
    found = places.models([str(elsewhere.parent), "."])
    assert [model.path for model in found[:3]] == ["mine", str(elsewhere), "tiny-tasks"]
    assert [model.source for model in found[2:]] == ["bundled"] * len(found[2:])


def test_data_of_the_current_folder_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "notes.txt").touch()
    found = [file.path for file in places.data(["."])]
    assert found == ["chats.jsonl", "builtin:tasks", "builtin:random", "notes.txt"]


def test_paths_are_completed(tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "b.bin").touch()
    (tmp_path / "models" / "chats.jsonl").touch()
    assert complete(f"{tmp_path}/mo") == f"{tmp_path}/models/"
    assert complete(f"{tmp_path}/models/", (".jsonl",)) == f"{tmp_path}/models/chats.jsonl"
    assert complete(f"{tmp_path}/models/x") is None and complete(f"{tmp_path}/none/x") is None


def test_paths_of_models_end_at_their_folders(tmp_path: Path):
    mine = tmp_path / "models" / "mine"
    mine.mkdir(parents=True)
    (tmp_path / "models" / "a.bin").touch()
    (mine / "config.json").touch()
    assert complete(f"{tmp_path}/mo", models=True) == f"{tmp_path}/models/"
    assert complete(f"{tmp_path}/models/", models=True) == str(mine)
    assert complete(str(mine), models=True) is None and complete(f"{mine}/", models=True) is None


# Processes


def test_the_helper_answers_refuses_and_fails():
    helper = ChildHelper()
    try:
        assert asyncio.run(helper.call(os.path.join, "a", "b")) == "a/b"
        with pytest.raises(UserError, match="invalid TOML"):
            asyncio.run(helper.call(Draft, Path("c.toml"), "a = "))
        with pytest.raises(HelperError, match="ZeroDivisionError"):
            asyncio.run(helper.call(divmod, 1, 0))
        asyncio.run(helper.call(print, "in the way of answers"))
        with pytest.raises(HelperError, match="ended"):
            asyncio.run(helper.call(os.kill, asyncio.run(helper.call(os.getpid)), signal.SIGKILL))
        helper.close()
        assert asyncio.run(helper.call(abs, -2)) == 2
    finally:
        helper.close()


def test_calls_that_nobody_waits_for_hold_up_nothing(monkeypatch: pytest.MonkeyPatch):
    """Those whose turn has not come are never made; the process of the one under way is ended soon."""
    monkeypatch.setattr("rptrain.tui.services.helper.GRACE", 0.05)
    ask_process, give_up = ChildHelper._ask, ChildHelper._give_up
    under_way: list[object] = []
    cancelled = threading.Event()  # the call of `len`

    def noted(helper: ChildHelper, function: Callable[..., object], given: tuple[object, ...]) -> tuple[str, object]:
        under_way.append(function)
        assert function is not len or cancelled.wait(PATIENCE)
        return ask_process(helper, function, given)

    async def ask(helper: ChildHelper) -> None:
        first = await helper.call(os.getpid)
        assert await asyncio.gather(*(helper.call(abs, -number) for number in range(50))) == list(range(50))
        asked = [asyncio.create_task(helper.call(time.sleep, 600)) for _ in range(20)]
        await wait_for(lambda: time.sleep in under_way)
        for one in asked:
            one.cancel()
        assert await helper.call(os.getpid) != first
        assert under_way.count(time.sleep) == 1
        second = await helper.call(os.getpid)
        late: list[Future[object]] = []  # its time is up
        monkeypatch.setattr(ChildHelper, "_give_up", lambda helper, asked: late.append(asked))
        quick = asyncio.create_task(helper.call(len, "abc"))
        await wait_for(lambda: len in under_way)
        quick.cancel()
        await asyncio.wait([quick])
        cancelled.set()
        await wait_for(lambda: len(late) > 0 and late[0].done())
        give_up(helper, late[0])
        assert await helper.call(os.getpid) == second  # it was done in time

    monkeypatch.setattr(ChildHelper, "_ask", noted)
    helper = ChildHelper()
    try:
        asyncio.run(ask(helper))
    finally:
        helper.close()


def ended(process: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_helper_ends_with_the_process_that_began_it():
    code = (
        "import asyncio, os, time\nfrom rptrain.tui.services.helper import ChildHelper\n"
        "print(asyncio.run(ChildHelper().call(os.getpid)), flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        parent.kill()
    tools.wait_for(lambda: ended(helper))


def test_a_launched_trainer_has_a_name_a_session_and_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = 'ps -o sid= -p $$; mkdir "$RUN"; touch "$RUN/config.toml"; echo "$LOOK $4"; read line; echo end'
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", script, "trainer"))
    (tmp_path / "mine").mkdir()
    run = tmp_path / "mine-2"
    launched = launch.start(Path("c.toml"), str(tmp_path), "mine", {"RUN": str(run), "LOOK": "none"})
    assert launched.path == run and launched.process.wait(PATIENCE) == 0
    assert launched.move_log() and launched.log == run / launch.LOG and not (tmp_path / "mine-2.log").exists()
    said = launched.said().splitlines()
    assert int(said[0]) == launched.process.pid != os.getsid(0)
    assert said[1:] == ['none log.run_name="mine-2"', "end"]
    with pytest.raises(UserError, match="cannot create a run"):
        launch.start(Path("c.toml"), "/proc/none", "mine", {})


def test_a_start_that_failed_leaves_its_log_until_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A name is taken as long as a trainer of it goes on, folder or not."""
    script = 'echo "$4"; echo no room; while test -e wait; do sleep 0.1; done'
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", script, "trainer"))
    monkeypatch.chdir(tmp_path)
    name = "🙂 " + "long" * 15
    first = launch.start(Path("c.toml"), ".", name, {})
    assert first.process.wait(PATIENCE) == 0 and not first.running and not first.move_log()
    assert first.said().splitlines() == [f'log.run_name="{name}"', "no room"] and first.log == Path(
        f".{name}.rptrain-log"
    )
    (tmp_path / "wait").touch()
    second, third = (launch.start(Path("c.toml"), ".", name, {}) for _ in range(2))
    assert (second.path, third.path) == (Path(name), Path(f"{name}-2"))
    (tmp_path / "wait").unlink()
    assert second.process.wait(PATIENCE) == third.process.wait(PATIENCE) == 0
    assert len(second.said().splitlines()) == 2 and launch.log_of(second.path) == second.log
    with pytest.raises(UserError, match="cannot create a run"):
        launch.start(Path("c.toml"), ".", "n" * 300, {})


def test_what_was_begun_is_looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is left behind: no zombie, and no log beside its run."""
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", 'mkdir "$RUN"; touch "$RUN/config.toml"', "trainer"))
    (tmp_path / "mine.log").write_text("not ours")
    context = Context(Draft(Path("c.toml")), tmp_path, ChildHelper(), Preferences(), tmp_path / "t.toml")
    context.environment = {"RUN": str(tmp_path / "mine")}
    launched = asyncio.run(context.start(Path("c.toml"), str(tmp_path), "mine"))

    def looked_after() -> bool:
        context.take_ended()
        return launched.process.returncode is not None

    tools.wait_for(looked_after)
    assert launched.process.returncode == 0 and (tmp_path / "mine" / launch.LOG).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "mine.log"}
    assert (tmp_path / "mine.log").read_text() == "not ours"


def test_commands_are_files(tmp_path: Path):
    control.ask(tmp_path, control.SAVE)
    assert (tmp_path / "control" / "SAVE").exists() and control.is_asked(tmp_path, control.SAVE)
    control.withdraw(tmp_path, control.SAVE)
    control.withdraw(tmp_path, control.SAVE)
    assert not control.is_asked(tmp_path, control.SAVE)
    with pytest.raises(UserError, match="cannot be sent to the trainer"):
        control.ask(tmp_path / "none", control.STOP)


@pytest.mark.parametrize("terminal", ["dumb", ""])
def test_a_terminal_that_only_prints_gets_the_way_without(monkeypatch: pytest.MonkeyPatch, terminal: str):
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pytest.raises(UserError, match="rptrain --config"):
        start.open_interface()
    with pytest.raises(UserError, match=r"r/events\.jsonl"):
        start.open_interface(Path("r"))


# Replays and curves


def test_a_replay_is_the_run_as_it_was(tmp_path: Path):
    replay = Replay(make_run(tmp_path, steps=100, total=100, end="finished"))
    replay.add(replay.news(141 / replay.speed))
    assert replay.view.step == 50 and replay.view.path.name == "llama" and replay.view.total_steps == 100
    first = replay.speed
    replay.faster(2)
    assert replay.speed == 2 * first
    replay.add(replay.news(20 / replay.speed))
    assert replay.view.step == 60
    replay.faster(1e-9)
    assert replay.speed == 1
    replay.faster(1e9)
    while not replay.done:
        replay.add(replay.news(1.0))
    assert replay.view.step == 100 and replay.left == 0.0 and replay.view.log[-1].text.startswith("finished")


def test_a_curve_of_dots():
    canvas = Canvas(4, 1)
    canvas.draw("red", [(0.0, 1.0), (1.0, 0.0)])
    assert canvas.row(0).plain == "⡠⠔⠊⠉"
    flat = Canvas(3, 1)
    flat.draw("", [(0.0, 0.0), (1.0, 0.0)])
    assert flat.row(0).plain == "⠉⠉⠉"
    point = Canvas(1, 1)
    point.draw("", [(0.0, 0.0)])
    assert point.row(0).plain == "⠁"
