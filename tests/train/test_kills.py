"""Wherever a run is killed, what is on the disk is whole or not taken, and going on ends with the same bits."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import rptrain.checkpoint.state
import rptrain.train.save
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events

from .. import run_tools as tools
from ..checkpoints import verify_checkpoint

STEPS = 4
EACH = (f"train.max_steps={STEPS}", "save.save_steps=1", "optim.lr_scheduler_type=linear")
OFTEN = (*EACH, "save.save_total_limit=2")
WHOLE = (*EACH, "log.run_name=whole")
CHANGES = ("open", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that nothing happened to, with every step's checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    tools.write_model(folder / "model")
    return tools.train_here(folder, *WHOLE)


def before_each_change(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    """Calls it ahead of everything that a save does to the disk; one file is written at a time meanwhile.

    What the main thread writes while it trains on does not belong to the save.
    """
    monkeypatch.setattr(rptrain.checkpoint.state, "THREADS", 1)
    busy: list[bool] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not busy and threading.current_thread() is not threading.main_thread():
                busy.append(True)
                look()
                busy.clear()
            return function(*arguments, **named)

        return call

    save = rptrain.train.save.save_state

    def armed(*arguments: Any, **named: Any) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, watched(getattr(os, name)))
            path = save(*arguments, **named)
        return path

    prune = rptrain.train.save.prune

    def armed_prune(*arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, watched(getattr(os, name)))
            prune(*arguments)

    monkeypatch.setattr(rptrain.train.save, "save_state", armed)
    monkeypatch.setattr(rptrain.train.save, "prune", armed_prune)


@pytest.mark.long
def test_every_state_of_the_disk_that_a_kill_can_leave(whole, tmp_path, monkeypatch):
    """Each is copied while a run goes on, as a kill would leave it there. All are looked through, some resumed."""
    tools.write_model(tmp_path / "model")
    run, left = RunDir(tmp_path / "runs/run"), tmp_path / "left"
    copies: list[Path] = []

    def copy() -> None:
        copies.append(left / str(len(copies)))
        shutil.copytree(run.checkpoints_path, copies[-1] / "checkpoints")
        for file in (run.config_path, run.events_path):
            shutil.copy(file, copies[-1])

    before_each_change(monkeypatch, copy)
    tools.train_here(tmp_path, *OFTEN)
    monkeypatch.undo()
    assert len(copies) > 40
    steps = set()
    for path in copies:
        for checkpoint in RunDir(path).checkpoints():
            verify_checkpoint(checkpoint)
            same = whole.checkpoint_path(int(checkpoint.name.split("-")[1].split(".")[0]))
            for file in checkpoint.glob("units/*"):
                assert file.read_bytes() == (same / "units" / file.name).read_bytes(), file
            steps.add(same.name)
    assert len(steps) == STEPS
    expected = tools.state(whole)
    for path in Random(0).sample(copies, 3):
        shutil.rmtree(tmp_path / "runs")
        shutil.copytree(path, run.path)
        assert tools.train_here(tmp_path, *OFTEN).path == run.path or not RunDir(path).checkpoints()
        (finished,) = (found for found in (tmp_path / "runs").iterdir() if RunDir(found).finished)
        assert tools.state(RunDir(finished)) == expected


def killed_at_random(folder: Path, trainers: tools.Trainers, whole: RunDir, kills: int) -> None:
    """Whatever of a run's time is left after a kill, the next may fall into all of it; a run that ends is compared."""
    tools.write_model(folder / "model")
    (began,), (ended,) = (tools.events(whole, kind) for kind in (events.RunStarted, events.Finished))
    usual, expected, random = ended.time - began.time, tools.state(whole), Random(0)
    left, finished = kills, False
    while left or not finished:
        if finished:
            shutil.rmtree(folder / "runs")
        code = trainers.train(folder, *OFTEN, seconds=random.uniform(0, usual) if left else None)
        found = [RunDir(path) for path in (folder / "runs").iterdir()]
        finished = code == 0
        if finished:  # several where a kill came between the last record and the end of its process
            ended = [run for run in found if run.finished]
            assert ended and all(tools.state(run) == expected for run in ended), kills - left
        else:
            assert code == -signal.SIGKILL
            left -= 1
            for checkpoint in [path for run in found for path in run.checkpoints()]:
                verify_checkpoint(checkpoint)


@pytest.mark.long
def test_killed_at_random_moments(whole, trainers, tmp_path):
    killed_at_random(tmp_path, trainers, whole, 3)


@pytest.mark.slow
def test_killed_at_fifty_random_moments(whole, trainers, tmp_path):
    killed_at_random(tmp_path, trainers, whole, 50)
