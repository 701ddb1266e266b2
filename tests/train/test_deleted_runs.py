"""A run whose folder is deleted ends with a message, and writes nothing into another that takes its place."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from rptrain.engine.engine import Engine
from rptrain.engine.snapshot import Snapshot
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.records import events
from rptrain.train import save as saving
from rptrain.train.trainer import Trainer
from rptrain.utils.errors import RunDeleted

from .. import run_tools as tools

BEST = ("data.val_size=0.3", "train.eval_steps=6", "save.save_steps=6", "save.load_best_model_at_end=true")


def delete(run: Path, again: bool) -> None:
    """At once, as far as the run can see; `again`: another one takes its place."""
    gone = run.rename(run.parent.parent / "gone")
    shutil.rmtree(gone)
    if again:
        (run / "checkpoints").mkdir(parents=True)
        (run / "lanes.jsonl").write_text("another run's")


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.sample(3, gate=6)
@pytest.mark.parametrize("again", [False, True], ids=["gone", "again"])
@pytest.mark.parametrize(
    ("moment", "overrides"),
    [
        (lambda event: isinstance(event, events.Step) and event.step == 2, ()),
        (lambda event: isinstance(event, events.CheckpointSaved), BEST),
        (lambda event: isinstance(event, events.CheckpointSaved), ()),
    ],
    ids=["before-a-record", "before-the-best-is-loaded", "before-the-export"],
)
def test_the_run_ends_with_a_message(folder, monkeypatch, moment, overrides, again):
    write, left = EventLog.write, []

    def act(log: EventLog, event: events.Event) -> None:
        write(log, event)
        if moment(event) and not left:
            delete(folder / "runs/run", again)
            left.append(contents(folder / "runs"))

    monkeypatch.setattr(EventLog, "write", act)
    tools.write_config(folder)
    threads = {*threading.enumerate()}
    told = tools.invoke("--config", folder / "run.toml", "engine.replan=false", *overrides)
    assert told.exit_code == 1 and isinstance(told.exception, SystemExit)
    assert f"{folder}/runs/run was deleted or moved during training" in told.stderr.splitlines()[-1]
    assert contents(folder / "runs") == left[0] and {*threading.enumerate()} <= threads


def test_a_run_that_was_moved_ends(folder, monkeypatch):
    """Another folder with the same files, in its place, is not written to."""
    write, run = EventLog.write, folder / "runs/run"

    def act(log: EventLog, event: events.Event) -> None:
        write(log, event)
        if isinstance(event, events.Step) and event.step == 2:
            shutil.copytree(run.rename(folder / "moved"), run)

    monkeypatch.setattr(EventLog, "write", act)
    tools.write_config(folder)
    told = tools.invoke("--config", folder / "run.toml", "log.logging_steps=2", "engine.replan=false")
    assert told.exit_code == 1 and f"{run} was deleted or moved during training" in told.stderr
    assert not list((run / "checkpoints").iterdir()) and not (run / "model").exists()


def test_no_step_begins_without_the_folder(folder, monkeypatch):
    """Also where neither a record nor a save would find out."""
    write, begin, begun = EventLog.write, Engine.forward_backward, []

    def act(log: EventLog, event: events.Event) -> None:
        write(log, event)
        if isinstance(event, events.Estimated):
            delete(folder / "runs/run", again=False)

    def counted(engine: Engine, *arguments: Any, **named: Any) -> Any:
        begun.append(engine)
        return begin(engine, *arguments, **named)

    monkeypatch.setattr(EventLog, "write", act)
    monkeypatch.setattr(Engine, "forward_backward", counted)
    with pytest.raises(RunDeleted):
        tools.train_here(folder, "log.logging_steps=100", "engine.replan=false")
    assert not begun


@pytest.mark.parametrize("again", [False, True], ids=["gone", "again"])
def test_no_save_begins_without_the_folder(folder, monkeypatch, again):
    """A save would rename a checkpoint of the same step that is not whole."""
    snapshot, left = Engine.snapshot, []

    def act(engine: Engine) -> Snapshot:
        delete(folder / "runs/run", again)
        if again:
            (folder / "runs/run/checkpoints/checkpoint-2").mkdir()
        left.append(contents(folder / "runs"))
        return snapshot(engine)

    monkeypatch.setattr(Engine, "snapshot", act)
    with pytest.raises(RunDeleted):
        tools.train_here(folder, "save.save_steps=2", "engine.replan=false")
    assert [contents(folder / "runs")] == left


def test_a_save_under_way_ends_without_a_checkpoint(folder, monkeypatch):
    save, left = saving.save_state, []

    def act(*arguments: Any, **named: Any) -> Path:
        delete(folder / "runs/run", again=True)
        left.append(contents(folder / "runs"))
        return save(*arguments, **named)

    monkeypatch.setattr(saving, "save_state", act)
    with pytest.raises(RunDeleted):
        tools.train_here(folder, "save.save_steps=2", "engine.replan=false")
    assert [contents(folder / "runs")] == left


@pytest.mark.parametrize("again", [False, True], ids=["gone", "again"])
def test_nothing_is_exported_without_the_folder(folder, monkeypatch, again):
    """It is deleted while the trained model is evaluated, after the last record and save."""
    left = []

    def act(trainer: Trainer, step: int) -> None:
        if step > 0:
            delete(folder / "runs/run", again)
            left.append(contents(folder / "runs"))

    monkeypatch.setattr(Trainer, "_ask_questions", act)
    with pytest.raises(RunDeleted):
        tools.train_here(folder, "engine.replan=false")
    assert [contents(folder / "runs")] == left


@pytest.mark.parametrize(
    ("error", "expected"),
    [(FileNotFoundError(2, "no such file"), "run was deleted"), (RuntimeError("mine"), "^mine\n")],
)
def test_another_failure_keeps_its_message(folder, monkeypatch, error, expected):
    """But for that of the system: files are missing as the folder is. How to resume is a note below."""

    def fail(trainer: Trainer, step: int) -> None:
        shutil.rmtree(folder / "runs/run")
        raise error

    monkeypatch.setattr(Trainer, "_ask_questions", fail)
    with pytest.raises(RuntimeError, match=expected):
        tools.train_here(folder)
    assert not list((folder / "runs").iterdir())
