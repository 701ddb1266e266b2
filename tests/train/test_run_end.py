"""Every end of a run leaves one last record, which says why it ended, before anything is closed."""

import errno
import json
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

import rptrain.train.end
import rptrain.train.save
import rptrain.train.trainer
from rptrain.engine.distributed.peers import PeerLost
from rptrain.engine.engine import Engine
from rptrain.engine.errors import EngineError
from rptrain.engine.stage_pass import StagePass
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.utils.errors import TrainingError

from .. import run_tools as tools

RESTART = "The run has no checkpoint: fix the problem and start again"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("owner", "name", "kind"),
    [(StagePass, "run", EngineError), (rptrain.train.trainer, "learning_rate", Mute)],
    ids=["worker", "trainer"],
)
def test_an_exception_whose_text_raises_is_recorded(owner, name, kind, tmp_path, monkeypatch):
    def fail(*values, **named):
        raise Mute

    tools.write_model(tmp_path / "model")
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(kind):
        tools.train_here(tmp_path)
    (failed,) = tools.events(RunDir(tmp_path / "runs/run"), events.Failed)
    assert failed.message.endswith("Mute (its message cannot be shown: __str__ raised RuntimeError)")


def test_an_exit_of_a_library_is_a_failure(tmp_path, monkeypatch):
    """The status of the process is that of a failure, not the library's."""
    monkeypatch.setattr(rptrain.train.trainer, "learning_rate", Mock(side_effect=SystemExit(3)))
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    told = tools.invoke("--config", tmp_path / "run.toml")
    assert (told.exit_code, told.stderr.splitlines()[-1]) == (1, "SystemExit: 3")
    assert last(tmp_path) == ("failed", "SystemExit: 3")


def test_a_long_reason_leaves_the_command_that_resumes_whole(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device", "x" * 400)
    monkeypatch.setattr("rptrain.train.trainer.export_store", Mock(side_effect=full))
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    run, told = RunDir(tmp_path / "runs/run"), tools.invoke("--config", tmp_path / "run.toml")
    assert told.stderr.endswith(f"with: rptrain --config {run.config_path} save.resume={run.path}\n")


@pytest.mark.parametrize(
    "place",
    ["session.open_store", "trainer.load_weights", "session.Telemetry", "session.Saver", "trainer.export_store"],
)
@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()], ids=["failed", "interrupted"])
def test_an_end_before_or_after_the_steps_is_recorded(tmp_path, monkeypatch, place, error):
    monkeypatch.setattr(f"rptrain.train.{place}", Mock(side_effect=error))
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    told = tools.invoke("--config", tmp_path / "run.toml")
    saved = 6 if place == "trainer.export_store" else 0
    if isinstance(error, KeyboardInterrupt):
        sentence = "stopped; the last checkpoint is of step 6" if saved else "stopped before the first checkpoint"
        assert (told.exit_code, last(tmp_path)) == (130, ("stopped", sentence))
        resume = "checkpoint-6 is complete: resume from it with: rptrain --config " if saved else "start again"
        assert resume in told.stdout.splitlines()[-1]
    else:
        kind, sentence = last(tmp_path)
        assert (told.exit_code, kind) == (1, "failed") and sentence and told.stderr.endswith(f"{sentence}\n")
        assert sentence.startswith("memory cannot be allocated: ")
        assert ("resume from it with: rptrain --config " if saved else RESTART) in sentence


def test_an_interrupt_in_the_final_evaluation_loses_no_model(tmp_path, monkeypatch):
    """The run ends as stopped after its last step, and resuming it exports the model."""

    def interrupt(trainer, step):
        if step > 0:
            raise KeyboardInterrupt

    tools.write_model(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(rptrain.train.trainer.Trainer, "_ask_questions", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tools.train_here(tmp_path)
    assert last(tmp_path) == ("stopped", "stopped; the last checkpoint is of step 6")
    resumed = tools.train_here(tmp_path)
    assert last(tmp_path) == ("finished", "finished after 6 steps") and (resumed.model_path / "config.json").is_file()


def test_the_record_precedes_the_closing_of_the_engine(tmp_path, monkeypatch):
    order: list[str] = []
    end, close = EventLog.end, Engine.close
    monkeypatch.setattr(EventLog, "end", lambda log, event: [order.append("record"), end(log, event)])
    monkeypatch.setattr(Engine, "close", lambda engine: [order.append("close"), close(engine)])
    monkeypatch.setattr(StagePass, "run", Mock(side_effect=Mute))
    tools.write_model(tmp_path / "model")
    with pytest.raises(EngineError):
        tools.train_here(tmp_path)
    assert order == ["record", "close"]


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (KeyboardInterrupt(), ("stopped", "stopped before the first checkpoint")),
        (PeerLost("it is gone"), ("failed", f"it is gone.\n{RESTART}")),
    ],
    ids=["interrupted", "without-another-process"],
)
def test_a_save_that_runs_is_canceled(tmp_path, monkeypatch, error, ended):
    """After a second signal, or if it cannot be completed. A save that hangs does not keep the run for long."""
    monkeypatch.setattr(rptrain.train.end, "CANCELING", 0.05)
    hangs, ends = threading.Event(), threading.Event()
    released: list[bool] = []  # by the last record, not by the deadline

    def save_state(*given, **named):
        hangs.set()
        released.append(ends.wait(tools.PATIENCE))

    def interrupt(step, **named):
        if step > 0:  # the save after the first step has begun
            assert hangs.wait(tools.PATIENCE)
            raise error
        return 0.01

    def end(log, event):
        write(log, event)
        ends.set()

    write = EventLog.end
    monkeypatch.setattr(EventLog, "end", end)
    monkeypatch.setattr(rptrain.train.save, "save_state", save_state)
    monkeypatch.setattr(rptrain.train.trainer, "learning_rate", interrupt)
    tools.write_model(tmp_path / "model")
    with pytest.raises((KeyboardInterrupt, TrainingError)):
        tools.train_here(tmp_path, "save.save_steps=1")
    assert last(tmp_path) == ended and released == [True]


def test_a_record_after_the_end_is_only_logged(tmp_path, caplog):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.end(events.Finished(6))
        log.write(events.SaveFailed(6, "no room"))
    assert [type(event) for event in events.read(tmp_path / "events.jsonl")] == [events.Finished]
    assert len(caplog.messages) == 1 and "no room" in caplog.messages[0]


def last(folder: Path) -> tuple[str, str | None]:
    """The name and the sentence of the last record."""
    (run,) = (folder / "runs").iterdir()
    event = [*events.read(run / "events.jsonl")][-1]
    return json.loads(events.to_line(event))["event"], event.sentence()
