"""The Python API: what commands do, in a process that is not theirs."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import rptrain
from rptrain.config.resolve import resolve
from rptrain.config.schema import Config
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events

from .. import run_tools as tools

ROOT = Path(__file__).resolve().parents[2]
LIGHT = """
import sys
import rptrain

heavy = {"torch", "transformers", "pydantic", "rich"}
assert not heavy & sys.modules.keys()
assert {"load_config", "plan", "train", "UserError", "TrainResult"} <= {*dir(rptrain)}
from rptrain import load_config, train

config = load_config({"model": {"path": "tiny-tasks"}, "data": {"train": [{"path": "builtin:random"}]}})
assert "torch" not in sys.modules
assert callable(train) and not hasattr(rptrain, "generate")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    return tmp_path


def config_of(folder: Path, *overrides: str) -> Config:
    return rptrain.load_config(folder / "run.toml", overrides)


@pytest.mark.long
def test_the_example_of_the_guide(tmp_path, monkeypatch):
    guide = (ROOT / "docs/guide/api.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("rptrain.toml").write_text((ROOT / "rptrain.toml").read_text())
    names: dict[str, Any] = {}
    exec(guide.partition("```python\n")[2].partition("```")[0], names)
    result = names["result"]
    assert (result.ended, result.steps) == ("finished", 20) and names["losses"][20] == result.loss


def test_importing_loads_nothing_heavy():
    subprocess.run([sys.executable, "-P", "-c", LIGHT], check=True)


def test_configs_of_files_and_of_mappings(folder):
    config = config_of(folder, "lora.r=4")
    assert config == resolve(folder / "run.toml", ["lora.r=4"]).config
    tables = config.model_dump(mode="json", exclude_none=True)
    assert rptrain.load_config(tables) == config
    assert rptrain.load_config({**tables, "log": {}}, "train.seed=3").train.seed == 3
    assert rptrain.load_config({**tables, "log": {}}).log.run_name == "run"
    paths = {**tables, "model": {**tables["model"], "path": folder / "model"}}
    assert rptrain.load_config(paths).model.path == str(folder / "model")
    with pytest.raises(rptrain.UserError, match="load_config"):
        rptrain.train(tables)  # type: ignore[arg-type]


def test_all_mistakes_are_named_with_their_places(folder):
    with pytest.raises(rptrain.UserError, match=r"micro_batch_size`(?s:.*)`train\.sed`: did you mean `train\.seed`"):
        config_of(folder, "train.sed=1", "train.micro_batch_size=0")
    with pytest.raises(rptrain.UserError, match=r"^Python: .*`train\.seed`"):
        rptrain.load_config({"model": {"path": "m"}, "data": {"train": [{"path": "d"}]}, "train": {"sed": 1}})
    config = config_of(folder, "data.train.0.path=none.jsonl", "model.path=nowhere")
    with pytest.raises(rptrain.UserError) as raised:
        rptrain.train(config, progress=False)
    assert "Python, data.train.0.path: none.jsonl" in str(raised.value)
    assert "Python, model.path: no model 'nowhere'" in str(raised.value)


def test_a_plan_is_that_of_the_command(folder):
    found = rptrain.plan(config_of(folder, "engine.devices=auto"), gpus=2, card="h100", host="64GiB")
    printed = tools.invoke(
        *("plan", "--json", "--config", folder / "run.toml", "--gpus", "2", "--card", "h100", "--host", "64GiB"),
        "engine.devices=auto",
    )
    told = json.loads(printed.stdout)
    assert found.fits and found.tokens_per_second == told["plan"]["tokens_per_second"]
    assert json.loads(json.dumps(found.to_dict())) == {key: told[key] for key in found.to_dict()}


def in_a_running_loop(train):
    async def cell():
        return train()

    return asyncio.run(cell())


def in_another_thread(train):
    found = []
    thread = threading.Thread(target=lambda: found.append(train()))
    thread.start()
    thread.join()
    return found[0]


def test_runs_leave_the_process_as_it_was(folder):
    """Two in one process: in a notebook's event loop, and in a thread, where no signal may be handled."""
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {*threading.enumerate()}, [signal.getsignal(kind) for kind in kinds]
    heard: list[events.Event] = []
    for name, called in (("first", in_a_running_loop), ("second", in_another_thread)):
        config = config_of(folder, f"log.run_name={name}", "train.max_steps=3", "data.val_size=0.3")
        result = called(lambda config=config: rptrain.train(config, heard.append, progress=False))
        assert (result.run, result.ended, result.steps) == (folder / "runs" / name, "finished", 3)
        assert result.model == result.run / "model" and (result.model / "model.safetensors").is_file()
        losses = tools.steps(RunDir.open(result.run))
        assert result.loss == losses[3][0]
        (validation,) = (event for event in heard if isinstance(event, events.Evaluation) and event.step == 3)
        assert result.evaluation == {"loss": validation.score}
        assert [event.step for event in heard if isinstance(event, events.Step)] == [1, 2, 3]
        assert isinstance(heard[-1], events.Finished)
        heard.clear()
    assert ({*threading.enumerate()}, [signal.getsignal(kind) for kind in kinds]) == before


def test_an_interrupt_saves_and_the_next_call_resumes(folder):
    def interrupt(event: events.Event) -> None:
        if isinstance(event, events.Step) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        rptrain.train(config_of(folder), interrupt, progress=False)
    run = RunDir.open(folder / "runs" / "run")
    assert not run.finished and run.saved_step >= 2
    result = rptrain.train(config_of(folder), progress=False)
    assert (result.run, result.ended, result.steps) == (run.path, "finished", 6)


def test_a_run_that_was_asked_to_stop_has_no_model(folder):
    def stop(event: events.Event) -> None:
        if isinstance(event, events.Step) and event.step == 2:
            (folder / "runs/run/control/STOP").touch()

    result = rptrain.train(config_of(folder), stop, progress=False)
    assert (result.ended, result.model) == ("stopped", None) and 2 <= result.steps < 6
