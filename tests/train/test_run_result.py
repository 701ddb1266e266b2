"""Commands on a run use its result and name its step: the best adapter, and the newest state of an extended run."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rptrain.checkpoint.export import export
from rptrain.checkpoint.run_states import LOSS, STEP, recorded
from rptrain.inference.model import find_model
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.events import Event, Step
from rptrain.train import validation
from rptrain.train.trainer import Trainer
from rptrain.utils.errors import TrainingError

from .. import run_tools as tools

BEST = ("data.val_size=0.3", "train.eval_steps=1", "save.save_steps=1", "save.load_best_model_at_end=true")
LOSSES = {1: 6.3, 2: 6.1518, 3: 6.16, 4: 6.1855}
PROMPT = ("--prompt", "Spell backwards: abcd", "--raw", "--max-new-tokens", "6")


def weights(directory: Path) -> dict[str, list]:
    (file,) = directory.glob("*.safetensors")
    return {name: tensor.tolist() for name, tensor in load_file(file).items()}


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_the_best_adapter_is_merged_and_answers(tmp_path, monkeypatch):
    """After early stopping, so that neither the last checkpoint nor the one before it is the best."""
    tools.write_model(tmp_path / "model")
    validate = Trainer._validate

    def scripted(trainer, engine, step):
        monkeypatch.setattr(validation, "loss", lambda *_: LOSSES[step])
        return validate(trainer, engine, step)

    monkeypatch.setattr(Trainer, "_validate", scripted)
    lora = ("lora.r=2", "lora.lora_alpha=4", "train.early_stopping_patience=2", "save.save_total_limit=2")
    run = tools.train_here(tmp_path, *BEST, *lora)
    assert run.checkpoints() == [run.checkpoint_path(2), run.checkpoint_path(4)] and run.finished
    before = files(run.path)
    best, last = (export(run.checkpoint_path(step), tmp_path / f"{step}", merge=True) for step in (2, 4))
    merged = tools.invoke("export", run.path, "--to", tmp_path / "merged", "--merge")
    assert f"{run.checkpoint_path(2)}: step 2, the lowest validation loss, 6.1518" in merged.stderr
    assert weights(tmp_path / "merged") == weights(best) != weights(last)
    adapter = json.loads(tools.invoke("export", run.path, "--to", tmp_path / "a", "--json").stdout.splitlines()[-1])
    assert adapter["step"] == 2 and weights(tmp_path / "a") == weights(run.model_path)
    assert {recorded(path) for path in (tmp_path / "merged", tmp_path / "a", run.model_path)} == {(2, 6.1518)}
    assert find_model(run.path).source == run.model_path and files(run.path) == before, "a command that reads"
    file = run.model_path / "complete.json"  # as earlier versions wrote it
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in (STEP, LOSS)}))
    assert find_model(run.path).source == run.model_path and find_model(run.path).state.startswith("step 2, ")


def test_a_run_that_was_extended_and_stopped_answers_with_its_newest_state(tmp_path, monkeypatch):
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, "train.max_steps=2")
    write = EventLog.write

    def fails(log: EventLog, event: Event) -> None:
        if isinstance(event, Step) and event.step == 5:
            raise OSError("planted")
        write(log, event)

    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="planted"):
        patch.setattr(EventLog, "write", fails)
        tools.train_here(tmp_path, "train.max_steps=6", "save.save_steps=2", f"save.resume={run.path}")
    run = RunDir(run.path)
    newest, before = run.checkpoint_path(4), files(run.path)
    answers = {source: tools.invoke("generate", source, *PROMPT) for source in (run.path, newest, run.model_path)}
    assert answers[run.path].stdout == answers[newest].stdout != answers[run.model_path].stdout
    said = f"{newest}: step 4, the newest state; model/ holds step 2, until the run finishes again\n"
    assert said in answers[run.path].stderr and f"{newest}: step 4\n" in answers[newest].stderr
    assert f"{run.model_path}: step 2\n" in answers[run.model_path].stderr
    exported = tools.invoke("export", run.path, "--to", tmp_path / "exported")
    assert said in exported.stderr and exported.stdout == f"{tmp_path / 'exported'}\n"
    assert recorded(tmp_path / "exported") == (4, None) and files(run.path) == before
