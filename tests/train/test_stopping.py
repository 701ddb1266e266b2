"""A signal during a step: the step is finished or dropped in time, and the resumed run has the same bits."""

import os
import signal
import threading
from pathlib import Path

import pytest

from rptrain.engine.engine import Engine
from rptrain.engine.progress import StepProgress
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train import end
from rptrain.train.end import Stopping
from rptrain.utils.signals import PROCESS

from .. import run_tools as tools


def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, visit: int, *overrides: str) -> RunDir:
    """A run that gets SIGTERM when the engine comes to a place for the given time, and that is held up there until the
    step is dropped.
    """
    opened, left = threading.Event(), [visit]

    def probe(where: str) -> None:
        if where == place:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                assert opened.wait(tools.PATIENCE)

    def opens(function):
        def call(engine: Engine):
            if place.startswith("optimizer"):  # an update that has begun is waited for
                opened.set()
            return function(engine)

        return call

    def drop(engine: Engine) -> None:
        drops(engine)
        opened.set()

    drops = Engine.drop
    with monkeypatch.context() as patch:
        patch.setattr("rptrain.train.session.Engine", tools.probed(probe))
        patch.setattr(Engine, "hold", opens(Engine.hold))
        patch.setattr(Engine, "drop", drop)
        with pytest.raises(KeyboardInterrupt):
            tools.train_here(folder, "save.stop_timeout=0", "engine.replan=false", *overrides)
    return RunDir(folder / "runs/run")


def check_resumed(folder: Path, run: RunDir, *overrides: str) -> None:
    """The run is resumed and ends with the bits of one that nothing happened to."""
    tools.train_here(folder, *overrides)
    assert run.finished
    whole = tools.train_here(folder, "log.run_name=whole", *overrides)
    assert tools.state(run) == tools.state(whole)
    assert tools.steps(run) == tools.steps(whole)


@pytest.mark.parametrize("update", ["async", pytest.param("sync", marks=pytest.mark.grid)])
def test_a_step_without_time_is_dropped_and_trained_again(folder, monkeypatch, update):
    kind = f"optim.update={update}"
    run = stopped(folder, monkeypatch, "gradient rows m1", 4, kind)
    assert [event.step for event in tools.events(run, events.CheckpointSaved)] == [3]
    assert max(tools.steps(run)) == 3 and tools.events(run, events.Stopped)[-1].step == 3
    check_resumed(folder, run, kind)


def test_a_dropped_step_after_a_checkpoint_is_not_saved_again(folder, monkeypatch):
    run = stopped(folder, monkeypatch, "gradient rows m1", 3, "save.save_steps=2")
    assert [event.step for event in tools.events(run, events.CheckpointSaved)] == [2]
    assert max(tools.steps(run)) == tools.events(run, events.Stopped)[-1].step == 2


def test_without_a_whole_step_nothing_is_saved(folder, monkeypatch):
    run = stopped(folder, monkeypatch, "embedding m1", 1)
    assert not run.checkpoints() and not tools.steps(run) and tools.events(run, events.Stopped)


def test_a_step_whose_update_has_begun_is_finished_and_evaluated(folder, monkeypatch):
    """As ever before it is saved: its checkpoint has its validation loss."""
    settings = ("data.val_size=8", "train.eval_steps=1", "train.early_stopping_patience=9")
    run = stopped(folder, monkeypatch, "optimizer update of embedding", 3, *settings)
    assert [event.step for event in tools.events(run, events.CheckpointSaved)] == [3]
    assert [event.step for event in tools.events(run, events.Evaluation)] == [1, 2, 3]
    check_resumed(folder, run, *settings)


class Now:
    seconds = 1000.0


@pytest.mark.parametrize(
    ("saved", "left", "waited", "save", "alone", "drops", "late"),
    [
        (0, 20.0, 0.0, 0.0, True, False, False),
        (0, 40.0, 0.0, 0.0, True, True, True),
        (0, 20.0, 0.0, 15.0, True, True, True),
        (0, 20.0, 15.0, 0.0, True, True, True),
        (7, 40.0, 0.0, 0.0, True, False, True),
        (7, 40.0, 30.0, 0.0, True, True, True),
        (0, None, 0.0, 0.0, True, False, True),
        (0, None, 30.0, 0.0, True, True, True),
        (0, 40.0, 60.0, 0.0, False, False, False),
    ],
    ids=[
        "in-time",
        "late",
        "save-late",
        "after-a-while",
        "nothing-to-save",
        "nothing-to-save-at-the-end",
        "unknown",
        "unknown-at-the-end",
        "several-processes",
    ],
)
def test_which_steps_are_dropped(monkeypatch, saved, left, waited, save, alone, drops, late):
    """Step 8, 30 seconds after a signal at the latest. What happens to it is said once."""
    monkeypatch.setattr(end, "monotonic", lambda: Now.seconds + waited)
    monkeypatch.setattr("rptrain.engine.progress.monotonic", lambda: Now.seconds)
    notes = list[str]()
    stop = Stopping(30.0, notes.append, lambda: saved, alone=alone)
    computed, began = (0.0, None) if left is None else (0.5, Now.seconds - left)
    progress = StepProgress(100, computed, 0.0, began, 0.0)
    assert not stop.drops(8, progress, save) and not notes, "no signal came"
    monkeypatch.setattr(PROCESS, "received", 1)
    monkeypatch.setattr(PROCESS, "first", Now.seconds)
    for _ in range(2):
        assert stop.drops(8, progress, save) == drops
    if drops:
        stop.dropped(8, progress)
    (note,) = notes
    assert "step 8" in note and "of 100 micro-batches" in note and ("dropped" in note) == (drops or late)
    assert drops or ("checkpoint-7" in note) == (saved == 7)


def test_a_step_that_ends_soon_is_not_reported(monkeypatch):
    notes = list[str]()
    monkeypatch.setattr(PROCESS, "received", 1)
    monkeypatch.setattr(PROCESS, "first", end.monotonic())
    progress = StepProgress(100, 0.5, 0.0, end.monotonic(), 0.0)
    assert not Stopping(1e9, notes.append, lambda: 0, alone=True).drops(2, progress, 0.0) and not notes
