"""Files that commands write where they are told: which are replaced, which are refused, and what is never touched."""

import json
import os
import re
from pathlib import Path

import pytest

from rptrain.config.resolve import resolve
from rptrain.runs.folder.outputs import Output, check, replace_text
from rptrain.runs.folder.run_dir import RunDir
from rptrain.utils.errors import UserError

from .. import run_tools as tools

MARK = re.compile(b"mark")
CONFIG = """\
[model]
path = "model"
[lora]
adapter = "adapter"
[data]
chat_template = "chat.jinja"
cache_dir = "cache"
train = [{ path = "rows.jsonl" }, { path = "rows" }, { path = "parts/*.jsonl" }]
val = [{ path = "held-out.jsonl" }]
"""
INPUTS = [
    "c.toml",
    "model/model.safetensors",
    "adapter/adapter_model.safetensors",
    "chat.jinja",
    "cache/tokens",
    "rows.jsonl",
    "rows/deep/a.json",
    "parts/1.jsonl",
    "held-out.jsonl",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and all that it names."""
    monkeypatch.chdir(tmp_path)
    for name in INPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mark of an input")
    (tmp_path / "c.toml").write_text(CONFIG)
    return tmp_path


def output(path: str, *, force: bool = False, option: str = "--svg") -> Output:
    return Output(option, Path(path), MARK, force)


def checked(*outputs: Output) -> None:
    check(outputs, Path("c.toml"), resolve("c.toml").config)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_another_program_wrote_is_replaced_only_by_force(folder):
    (folder / "theirs.svg").write_text("not the mark")
    (folder / "empty.svg").touch()
    (folder / "ours.svg").write_text("mark, and more")
    before = contents(folder)
    for name in ("theirs.svg", "empty.svg"):
        with pytest.raises(UserError, match=f"--svg: {name} exists, and this command did not write it.*--force"):
            checked(output(name))
        checked(output(name, force=True))
    checked(output("ours.svg"), output("new.svg", option="--trace"))
    assert contents(folder) == before


def test_a_file_that_came_after_the_check_is_not_replaced(folder):
    late = output("late.svg")
    checked(late)
    (folder / "late.svg").write_text("theirs")
    with pytest.raises(UserError, match="exists"):
        late.write("mark")
    assert (folder / "late.svg").read_text() == "theirs"


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_is_refused_whatever_it_holds_and_however_it_is_named(folder, name):
    """Also by another path, by links, and with --force."""
    (folder / "soft.svg").symlink_to(folder / name)
    os.link(folder / name, folder / "hard.svg")
    before = contents(folder)
    for path in (name, f"rows/../{name}", str(folder / name), "soft.svg", "hard.svg"):
        with pytest.raises(UserError, match="is part of the input"):
            checked(output(path, force=True))
    assert contents(folder) == before


def test_nothing_new_is_put_among_the_inputs(folder):
    (folder / "linked").symlink_to(folder / "rows")
    for path in ("model/new.svg", "rows/deep/new.json", "linked/new.json"):
        with pytest.raises(UserError, match="is part of the input"):
            checked(output(path))


def test_an_input_behind_a_link_in_its_folder_is_refused(folder):
    """As in the hub's cache, whose folders of models hold links."""
    (folder / "blob").write_text("weights")
    (folder / "model" / "linked.safetensors").symlink_to(folder / "blob")
    with pytest.raises(UserError, match=r"blob is part of the input model \(model.path\)"):
        checked(output("blob", force=True))


def test_a_model_that_is_named_by_its_hub_id_is_an_input(folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    weights = folder / "hub" / "models--a--b" / "snapshots" / "1" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    for file in (weights, weights.with_name("config.json")):
        file.write_text("{}")
    config = resolve("c.toml", ["model.path=a/b"]).config
    with pytest.raises(UserError, match="is part of the input"):
        check([output(str(weights), force=True)], Path("c.toml"), config)


def test_the_files_of_a_run_are_refused_and_what_was_added_to_them_is_not(folder):
    run = RunDir.create(folder / "runs", "run")
    run.events_path.touch()
    for name in ("config.toml", "events.jsonl", "timings.json", "checkpoints/a", "model/model.safetensors"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("of the run")
        with pytest.raises(UserError, match="is part of the run"):
            checked(output(f"runs/run/{name}", force=True))
    for name in ("control/STOP", "checkpoints/new.svg"):
        (run.path / name).parent.mkdir(exist_ok=True)
        with pytest.raises(UserError, match="is part of the run"):
            checked(output(f"runs/run/{name}"))
    (run.path / "step.svg").write_text("mark")
    checked(output("runs/run/step.svg"), output("runs/run/new.svg"))


def test_a_folder_with_a_config_is_a_run_once_it_has_events_or_a_checkpoint(folder):
    (folder / "project/checkpoints/checkpoint-1").mkdir(parents=True)
    (folder / "project/config.toml").touch()
    checked(output("project/plots.svg"), output("project/checkpoints/step.svg"))
    (folder / "project/checkpoints/checkpoint-1/complete.json").write_text("{}")
    with pytest.raises(UserError, match="is part of the run"):
        checked(output("project/checkpoints/step.svg"))


def test_two_outputs_have_two_names(folder):
    (folder / "link.json").symlink_to(folder / "step.svg")
    for other in ("step.svg", "./step.svg", "link.json"):
        with pytest.raises(UserError, match=r"--svg and --trace name the same file, step.svg"):
            checked(output("step.svg"), output(other, option="--trace"))


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode_and_its_links(folder):
    (folder / "real.svg").write_text("mark")
    (folder / "real.svg").chmod(0o640)
    (folder / "step.svg").symlink_to("real.svg")
    long = output("step.svg")
    with tools.room_for(4096), pytest.raises(UserError, match=r"step.svg cannot be written: File too large"):
        long.write("mark" * 4096)
    assert (folder / "real.svg").read_text() == "mark" and not list(folder.glob(".rptrain-*"))
    long.write("mark, longer")
    assert (folder / "step.svg").is_symlink() and (folder / "real.svg").read_text() == "mark, longer"
    assert (folder / "real.svg").stat().st_mode & 0o777 == 0o640
    replace_text(folder / "new.svg", "new")
    (folder / "plain").touch()
    assert (folder / "new.svg").stat().st_mode == (folder / "plain").stat().st_mode


def test_a_folder_in_the_place_of_the_file_in_the_end(folder):
    (folder / "step.svg").mkdir()
    with pytest.raises(UserError, match=r"step.svg exists, and this command did not write it"):
        output("step.svg").write("mark")
    with pytest.raises(UserError, match=r"step.svg cannot be written: Is a directory"):
        output("step.svg", force=True).write("mark")
    assert not list(folder.glob(".rptrain-*"))


def test_the_marks_of_commands_differ(folder, monkeypatch):
    """plan replaces what it wrote itself, and neither a trace of bench nor a picture in a page."""
    tools.plan_with(monkeypatch, tools.STAGES)
    tools.write_model(folder / "tiny")
    config = tools.CONFIG.replace("{folder}/model", "tiny").format(folder=folder)
    (folder / "run.toml").write_text(config)
    plan, bench = ["plan", "--config", "run.toml"], ["bench", "--config", "run.toml", "--warmup", "1", "--steps", "1"]
    for _ in range(2):
        assert tools.invoke(*plan, "--svg", "step.svg", "--trace", "plan.json").exit_code == 0
        assert tools.invoke(*bench, "engine.replan=false", "--trace", "bench.json").exit_code == 0
    (folder / "page.svg").write_text("<html>" + (folder / "step.svg").read_text())
    before = contents(folder)
    assert next(iter(json.loads(before["bench.json"]))) == "otherData"
    for command in (
        [*plan, "--svg", "plan.json"],
        [*plan, "--svg", "page.svg"],
        [*plan, "--trace", "bench.json"],
        [*bench, "--trace", "plan.json"],
        [*bench, "--trace", "step.svg"],
    ):
        result = tools.invoke(*command)
        assert result.exit_code == 2 and "exists, and this command did not write it" in result.stderr
        assert result.stdout == ""
    for command in ([*plan, "--svg", "run.toml"], [*plan, "--trace", "tiny/model.safetensors"]):
        result = tools.invoke(*command, "--force")
        assert result.exit_code == 2 and "is part of the input" in result.stderr
    assert contents(folder) == before
    assert tools.invoke(*plan, "--trace", "bench.json", "--force").exit_code == 0
    assert tools.invoke(*plan, "--trace", "bench.json").exit_code == 0
