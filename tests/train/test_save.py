"""Checkpoints are written while training continues; a failed one is reported, and training continues."""

import errno
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rptrain.train.save
from rptrain.checkpoint import atomic_dir
from rptrain.checkpoint.processes import Processes
from rptrain.config.schema import Save
from rptrain.engine.engine import Engine
from rptrain.engine.iteration import PendingLoss
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.save import Saver

from .. import run_tools as tools
from ..cases import grid
from ..checkpoints import verify_checkpoint


@pytest.mark.parametrize("change", ["config", "folder"])
def test_changes_of_the_models_folder_during_a_run_do_not_reach_its_checkpoints(folder, monkeypatch, change):
    save, model = rptrain.train.save.save_state, folder / "model"
    config = model / "config.json"
    before = config.read_bytes()

    def changed(*arguments, **named):
        if model.exists() and change == "folder":
            model.rename(folder / "moved")
        elif change == "config":
            config.write_text(json.dumps(json.loads(before) | {"rms_norm_eps": 0.5}))
        return save(*arguments, **named)

    monkeypatch.setattr(rptrain.train.save, "save_state", changed)
    run = tools.train_here(folder, "save.save_steps=1", "train.max_steps=2")
    assert len(run.checkpoints()) == 2
    for checkpoint in run.checkpoints():
        assert (checkpoint / "base/config.json").read_bytes() == before
    exported = json.loads((run.model_path / "config.json").read_bytes())
    assert exported.get("rms_norm_eps") == json.loads(before).get("rms_norm_eps")


def slow_saves(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    save = rptrain.train.save.save_state

    def slowly(*arguments, background, **named):
        def wait() -> None:
            time.sleep(seconds)
            background.proceed()

        return save(*arguments, background=replace(background, proceed=wait), **named)

    monkeypatch.setattr(rptrain.train.save, "save_state", slowly)


@pytest.mark.parametrize("update", ["async", grid("sync")])
def test_slow_saves_change_no_bit_and_are_measured(folder, monkeypatch, update):
    """Each is what a run that ends there leaves."""
    kind = f"optim.update={update}"
    expected = {
        step: tools.state(tools.train_here(folder, kind, f"train.max_steps={step}", f"log.run_name=to{step}", *flat))
        for step in (2, 4, 6)
        for flat in [("optim.lr_scheduler_type=constant", "optim.warmup_steps=0")]
    }
    slow_saves(monkeypatch, 0.01)
    flat = ("optim.lr_scheduler_type=constant", "optim.warmup_steps=0")
    run = tools.train_here(folder, kind, *flat, "save.save_steps=2")
    for checkpoint, step in zip(run.checkpoints(), (2, 4, 6), strict=True):
        verify_checkpoint(checkpoint)
        there = {file.name: file.read_bytes() for file in checkpoint.glob("units/*")}
        assert there == {name: content for name, content in expected[step].items() if name in there}
    for event in tools.events(run, events.CheckpointSaved):
        assert event.seconds is not None and event.paused is not None
        assert event.seconds > 0.05 and 0 <= event.paused <= event.seconds


def test_the_pause_of_a_save_has_the_time_in_which_the_pipeline_ran_empty(folder, monkeypatch):
    """A step's result takes a while here, and then the snapshot."""
    result, snapshot = PendingLoss.result, Engine.snapshot

    def late(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (time.sleep(seconds), call(*arguments))[1]

    monkeypatch.setattr(PendingLoss, "result", late(0.2, result))
    monkeypatch.setattr(Engine, "snapshot", late(0.1, snapshot))
    saved = tools.events(tools.train_here(folder, "save.save_steps=2"), events.CheckpointSaved)
    assert [event.step for event in saved] == [2, 4, 6]
    assert all(0.1 <= event.paused <= event.save_pause_s - 0.2 for event in saved)


def fail_from(monkeypatch: pytest.MonkeyPatch, step: int, call: int) -> None:
    """No room for a write of the save of this step, from a call on."""
    write, left = atomic_dir.Aside.write, [call]

    def full(aside: atomic_dir.Aside, name: str, *content, **options) -> None:
        if aside.path.parent.name.startswith(f".checkpoint-{step}."):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(aside.path / name))
        write(aside, name, *content, **options)

    monkeypatch.setattr(atomic_dir.Aside, "write", full)


@pytest.mark.sample(1, gate=3)
@pytest.mark.parametrize("call", [0, 2, 7])
def test_a_full_disk_costs_the_checkpoint_and_the_run_goes_on(folder, monkeypatch, call):
    expected = tools.state(tools.train_here(folder, "log.run_name=whole"))
    fail_from(monkeypatch, 4, call)
    run = tools.train_here(folder, "save.save_steps=2")
    (failed,) = tools.events(run, events.SaveFailed)
    assert failed.step == 4 and "No space left" in failed.message
    assert [path.name for path in sorted(run.checkpoints_path.iterdir())] == ["checkpoint-2", "checkpoint-6"]
    assert run.finished and tools.state(run) == expected
    for checkpoint in run.checkpoints():
        verify_checkpoint(checkpoint)


def test_a_full_disk_at_the_end_fails_the_run_and_keeps_the_checkpoint_before(folder, monkeypatch):
    fail_from(monkeypatch, 6, 3)
    tools.write_config(folder)
    told = tools.invoke("--config", folder / "run.toml", "save.save_steps=4")
    run = RunDir(folder / "runs/run")
    command = f"rptrain --config {run.config_path} save.resume={run.path}"
    assert told.exit_code == 1 and "No space left" in told.stderr
    assert told.stderr.endswith(f"checkpoint-4 is complete: fix the problem, then resume from it with: {command}\n")
    assert [path.name for path in run.checkpoints_path.iterdir()] == ["checkpoint-4"]
    verify_checkpoint(run.checkpoint_path(4))
    monkeypatch.undo()
    assert tools.invoke(*shlex.split(command)[1:]).exit_code == 0
    assert run.finished and [event.step for event in tools.events(run, events.Resumed)] == [4]


def test_an_interrupt_that_ends_the_run_at_once_gives_the_save_up(folder, monkeypatch):
    slow_saves(monkeypatch, 0.05)
    write = EventLog.write

    def interrupt(log: EventLog, event: events.Event) -> None:
        write(log, event)
        if isinstance(event, events.Step) and event.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(EventLog, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tools.train_here(folder, "save.save_steps=2")
    run = RunDir(folder / "runs/run")
    assert [path.name for path in run.checkpoints_path.iterdir()] in ([], ["checkpoint-2"])
    assert not list(run.checkpoints_path.glob("*partial"))


def test_what_a_kill_after_the_last_save_left_is_deleted(folder):
    run = tools.train_here(folder, "train.max_steps=2")
    left = atomic_dir.beside(run.checkpoint_path(1), atomic_dir.PARTIAL)
    left.mkdir()
    (left / atomic_dir.MARK).touch()
    run.model_path.rename(folder / "model-before")
    run.events_path.write_text("".join(run.events_path.read_text().splitlines(keepends=True)[:-1]))
    assert tools.train_here(folder, "train.max_steps=2").path == run.path
    assert not left.exists()


def test_only_the_first_process_reads_and_removes_old_checkpoints(tmp_path, monkeypatch):
    """Another one would read checkpoints while they are removed."""
    read: list[Path] = []
    monkeypatch.setattr(rptrain.train.save, "checkpoints_by_loss", lambda path: read.append(path) or [])
    config = Save(load_best_model_at_end=True)
    for rank in (0, 1):
        processes = Processes(rank, lambda own: [own])
        with Saver(RunDir(tmp_path), (), {}, config, SimpleNamespace(), processes):
            pass
        assert len(read) == 1
