"""What a run is told while it goes on: files in its control folder, and how they go together."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rptrain.runs.folder.control import Control
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.save import Saver

from .. import run_tools as tools


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tools.write_model(tmp_path / "model")
    return tmp_path


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "runs/run/control"


def at_step(
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    action: Callable[[], object],
    kind: type[events.Step | events.Paused] = events.Step,
) -> None:
    """Calls it when the record of a step, or a later one, is written, once."""
    write, done = EventLog.write, []

    def act(log: EventLog, event: events.Event) -> None:
        write(log, event)
        if isinstance(event, kind) and event.step >= step and not done:
            done.append(True)
            action()

    monkeypatch.setattr(EventLog, "write", act)


def test_stop_saves_and_ends_and_the_same_command_goes_on(folder, control, monkeypatch):
    expected = tools.state(tools.train_here(folder, "log.run_name=whole"))
    at_step(monkeypatch, 2, (control / "STOP").touch)
    config = tools.write_config(folder)
    told = tools.invoke("--config", folder / "run.toml", "--json")
    run = RunDir(folder / "runs/run")
    assert (told.exit_code, json.loads(told.stdout)) == (0, {"run": str(run.path), "model": None})
    (saved,), (stopped,) = tools.events(run, events.CheckpointSaved), tools.events(run, events.Stopped)
    assert 2 <= saved.step == stopped.step < 6 and stopped.by == "STOP"
    assert not (control / "STOP").exists() and not run.finished and not run.model_path.exists()
    assert tools.train_here(folder).path == run.path and config.config.save.resume == "auto"
    assert [event.step for event in tools.events(run, events.Resumed)] == [stopped.step]
    assert tools.state(run) == expected


def test_a_stopped_run_names_its_checkpoint_and_the_command_that_resumes_it(folder, control, monkeypatch):
    at_step(monkeypatch, 2, (control / "STOP").touch)
    tools.write_config(folder)
    told = tools.invoke("--config", folder / "run.toml")
    (saved,) = tools.events(RunDir(folder / "runs/run"), events.CheckpointSaved)
    how = f"checkpoint-{saved.step} is complete: resume from it with: rptrain --config "
    assert told.exit_code == 0 and how in told.stdout


def test_save_saves_once_and_goes_on(folder, control, monkeypatch):
    expected = tools.state(tools.train_here(folder, "log.run_name=whole"))
    at_step(monkeypatch, 2, (control / "SAVE").touch)
    run = tools.train_here(folder)
    first, last = (event.step for event in tools.events(run, events.CheckpointSaved))
    assert 2 <= first < last == 6
    assert not (control / "SAVE").exists() and run.finished
    assert tools.state(run) == expected


def test_pause_holds_until_it_is_taken_away_and_saves_meanwhile(folder, control, monkeypatch):
    expected = tools.state(tools.train_here(folder, "log.run_name=whole"))
    at_step(monkeypatch, 2, (control / "PAUSE").touch)
    run = RunDir(folder / "runs/run")
    before: list[int] = []

    def hand() -> None:
        tools.wait_for(lambda: run.events_path.exists() and bool(tools.events(run, events.Paused)))
        before.append(max(tools.steps(run)))
        (control / "SAVE").touch()
        tools.wait_for(lambda: not (control / "SAVE").exists())
        before.append(max(tools.steps(run)))
        (control / "PAUSE").unlink()

    thread = threading.Thread(target=hand)
    thread.start()
    tools.train_here(folder)
    thread.join()
    (paused,), (going,) = tools.events(run, events.Paused), tools.events(run, events.Continued)
    assert before == [paused.step, paused.step] and going.step == paused.step < 6
    assert paused.step in [event.step for event in tools.events(run, events.CheckpointSaved)]
    assert tools.state(run) == expected


def test_stop_ends_a_pause(folder, control, monkeypatch):
    at_step(monkeypatch, 2, (control / "PAUSE").touch)
    at_step(monkeypatch, 2, (control / "STOP").touch, events.Paused)
    run = tools.train_here(folder)
    assert tools.events(run, events.Paused)[0].step == tools.events(run, events.Stopped)[0].step < 6


def test_commands_from_before_are_removed_and_told(tmp_path):
    told: list[str] = []
    Control(tmp_path / "control", told.append)
    for name in ("SAVE", "STOP", "PAUSE"):
        (tmp_path / "control" / name).touch()
    again = Control(tmp_path / "control", told.append)
    assert not (again.stops or again.saves or again.pauses)
    assert len(told) == 3 and all("was left from before" in line for line in told)


def test_folders_are_commands_too_and_one_that_cannot_be_removed_counts_once(folder, control, monkeypatch):
    """An empty folder is removed; one with a file in it is told, and saves no second time."""
    expected = tools.state(tools.train_here(folder, "log.run_name=whole"))

    def put() -> None:
        (control / "SAVE").mkdir()
        (control / "SAVE/file").touch()

    at_step(monkeypatch, 2, put)
    monkeypatch.setattr(Saver, "poll", Saver.wait)  # so that another save could begin with the next step
    tools.write_config(folder)
    told = tools.invoke("--config", folder / "run.toml")
    run = RunDir(folder / "runs/run")
    first, last = (event.step for event in tools.events(run, events.CheckpointSaved))
    assert first < last == 6 and run.finished and tools.state(run) == expected
    assert told.exit_code == 0 and "SAVE cannot be removed (Directory not empty): it is ignored" in told.stdout


def test_what_cannot_be_removed_counts_again_once_it_was_gone(tmp_path):
    told: list[str] = []
    (tmp_path / "control/STOP/inner").mkdir(parents=True)
    (tmp_path / "control/PAUSE").mkdir()
    control = Control(tmp_path / "control", told.append)
    assert not (control.stops or control.pauses) and not (tmp_path / "control/PAUSE").exists() and len(told) == 2
    (tmp_path / "control/STOP/inner").rmdir()
    (tmp_path / "control/STOP").rmdir()
    assert not control.stops
    (tmp_path / "control/STOP").touch()
    assert control.stops


def test_a_folder_that_cannot_be_made_gives_no_commands(tmp_path):
    told: list[str] = []
    (tmp_path / "control").touch()
    control = Control(tmp_path / "control", told.append)
    assert not (control.stops or control.saves or control.pauses)
    assert len(told) == 1 and "cannot be created: File exists" in told[0]
