"""A stall is reported with what every thread and stream waits for, and ends the process, whatever hangs."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import rptrain.train.watchdog
from rptrain.engine.devices.cuda import CudaStream
from rptrain.engine.stage_pass import StagePass
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.watchdog import Watchdog, Watched
from rptrain.utils import liveness
from rptrain.utils.errors import RunDeleted
from rptrain.utils.native_watchdog import NativeWatchdog

from .. import run_tools as tools

STALLED = """
import ctypes, signal, sys, time
from pathlib import Path
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.records.events import CheckpointSaved
from rptrain.utils.signals import PROCESS
from rptrain.train import watchdog
from rptrain.train.watchdog import Watchdog, Watched
from rptrain.utils import native
from rptrain.utils.native_watchdog import NativeWatchdog

def hold():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

PROCESS.install({native})
watchdog.GRACE, watchdog.BLOCKED = {grace}, {grace} / 2
folder = Path(sys.argv[1])
log, saved = EventLog(folder / "events.jsonl"), [7]
with Watchdog(PROCESS.native, ends_process=True) as dog:
    fail = lambda error: print(error, flush=True)
    how = lambda: f"resume from {{saved[-1]}}"
    run = Watched(folder, folder / "events.jsonl", log.write, log.check, fail, lambda: saved[-1], how)
    log.listen(dog.hear)
    with dog.watching(run), dog.doing("saving"):
        dog.configure(0.3, "{action}")
        {body}
print("closed", flush=True)
"""
needs_compiler = pytest.mark.skipif(NativeWatchdog.load() is None, reason="needs a C compiler")


def stalled(
    folder: Path, body: str, *, action: str = "stop", native: str = "NativeWatchdog.load()", grace: float = 20.0
) -> tuple[int, str, str]:
    """Exit status and output of a process that does `body`, within 0.3 seconds of which something should happen."""
    text = STALLED.format(body=body, action=action, native=native, grace=grace)
    line = [sys.executable, "-P", "-c", text, str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=tools.PATIENCE)
    return done.returncode, done.stdout, done.stderr


def last(folder: Path) -> events.Event:
    return [*events.read(folder / "events.jsonl")][-1]


def test_a_process_without_progress_is_ended(tmp_path):
    code, out, err = stalled(tmp_path, "time.sleep(1000)")
    message = "no progress for 0.3 seconds while saving: the process was ended"
    assert (code, out) == (1, f"{message}\n")
    report = tmp_path / "stalled-0.txt"
    assert err.endswith(f"\n{message}\n{report} says what everything waits for\n")
    assert "in <module>" in report.read_text()
    told = last(tmp_path)
    assert isinstance(told, events.Stalled) and (told.phase, told.path) == ("saving", str(report))


@needs_compiler
def test_a_process_whose_lock_is_held_is_ended_with_a_record(tmp_path):
    """By the thread in C, which cuts off a line that was half written. Stacks are on stderr."""
    body = "log._file._file.write(b'{half'), hold()"
    code, out, err = stalled(tmp_path, body, grace=0.5)
    message = "no progress for 0.3 seconds while saving: the process was ended"
    assert (code, out) == (1, "") and f"\n{message}\n" in err and "in hold" in err
    told = last(tmp_path)
    assert isinstance(told, events.Failed) and told.message == message and abs(told.time - time.time()) < tools.PATIENCE


@needs_compiler
def test_a_report_that_hangs_does_not_keep_the_process(tmp_path):
    code, _, err = stalled(tmp_path, "dog._text = lambda waiting: time.sleep(1000); time.sleep(1000)", grace=0.5)
    assert code == 1 and "the process was ended" in err and isinstance(last(tmp_path), events.Failed)


@needs_compiler
@pytest.mark.parametrize(
    ("before", "step"), [("", 7), ("saved.append(8); log.write(CheckpointSaved(8, 'checkpoints/checkpoint-8')); ", 8)]
)
def test_the_third_signal_names_the_last_checkpoint_and_how_to_resume(tmp_path, before: str, step: int):
    signals = "[(signal.raise_signal(number), time.sleep(0.3)) for number in (1, 2, 15)]"
    body = f"{before}PROCESS.close(); {signals}; time.sleep(1000)"
    code, out, err = stalled(tmp_path, body, action="report")
    assert (code, out) == (130, "") and err.endswith(f"\ninterrupted\nresume from {step}\n")
    told = last(tmp_path)
    assert isinstance(told, events.Stopped) and told.step == step


@needs_compiler
def test_a_process_that_was_stopped_is_not_ended(tmp_path):
    """As by Ctrl-Z, or a container that was paused: its clock went on. Stacks are not shown, either."""
    body = """
        import os, subprocess
        stop = f"kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"
        other = subprocess.Popen(["sh", "-c", stop])
        while other.poll() is None:
            dog.heartbeat(1)
            time.sleep(0.01)
        for _ in range(20):
            dog.heartbeat(1)
            time.sleep(0.1)"""
    code, out, err = stalled(tmp_path, body, grace=0.6)
    assert (code, out, err) == (0, "closed\n", "")


def test_without_a_compiler_stacks_are_shown_and_the_process_ends_without_a_record(tmp_path):
    code, out, err = stalled(tmp_path, "hold()", native="None", grace=0.5)
    assert (code, out) == (1, "") and "in hold" in err and not (tmp_path / "events.jsonl").read_text()


def test_a_stall_is_only_reported_if_the_config_says_so(tmp_path):
    code, out, _ = stalled(tmp_path, "time.sleep(1.5)", action="report", grace=0.1)
    assert (code, out) == (0, "closed\n")
    assert {type(event) for event in events.read(tmp_path / "events.jsonl")} == {events.Stalled}


@pytest.mark.parametrize("body", ["time.sleep(1000)", pytest.param("hold()", marks=needs_compiler)])
def test_a_process_that_does_not_close_ends_with_the_status_of_its_run(tmp_path, body):
    code, out, err = stalled(tmp_path, f"dog.closing(5, 'the reason.'); {body}", action="report", grace=0.5)
    assert (code, out) == (5, "")
    assert "the reason. The process did not close within 0.3 seconds" in err
    assert {type(event) for event in events.read(tmp_path / "events.jsonl")} <= {events.Stalled}
    assert (tmp_path / "closing.txt").exists() == ("sleep" in body)


def test_a_hanging_computation_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    """A pass over the head in the second step waits until the record of it is there.

    It waits in one call: the stack of a thread that runs on meanwhile may lack frames. A busy machine may stall other
    steps too.
    """
    head, report, calls, told = StagePass._head, Watchdog._report, [], []
    run, hanging, reported = RunDir(tmp_path / "runs/run"), threading.Event(), threading.Event()

    def reports(watchdog):
        in_time = hanging.is_set()  # all of the report is about it
        report(watchdog)
        if in_time:
            told.extend(tools.events(run, events.Stalled)[-1:])
            reported.set()

    def hangs(work, scale, loss):
        calls.append(None)
        if len(calls) == 4 + 3:
            liveness.progressed()  # a stall from before is over
            hanging.set()
            assert reported.wait(tools.PATIENCE)
        head(work, scale, loss)

    monkeypatch.setattr(Watchdog, "_report", reports)
    monkeypatch.setattr(rptrain.train.watchdog, "POLL", 0.05)
    monkeypatch.setattr(StagePass, "_head", hangs)
    tools.write_model(tmp_path / "model")
    tools.train_here(tmp_path, "engine.stall_timeout=0.7", "optim.update=sync")
    stall, text = told[0], Path(told[0].path).read_text()
    assert stall.step == 1 and stall.phase == "training"
    assert "has work" in [stall.waiting.get(f"cpu:{index} compute stream") for index in (0, 1)]
    assert "compute stream: has work" in text
    assert "thread optimizer\n" in text
    assert "in hangs" in text
    assert run.finished


def test_a_stream_is_left_alone_while_it_is_captured():
    """A query would break the capture: the stream counts as idle until then."""
    stream = CudaStream.__new__(CudaStream)
    stream._capturing, stream._stream = threading.Lock(), Mock(query=Mock(return_value=False))
    with stream._capturing:
        assert not stream.busy()
    stream._stream.query.assert_not_called()
    assert stream.busy() and not stream._capturing.locked()


def watched(folder: Path, told: list[events.Event], check: Callable[[], None] = lambda: None) -> Watched:
    return Watched(folder, folder / "events.jsonl", told.append, check, lambda error: None, lambda: 0, str)


def test_each_stall_is_told_once(tmp_path, monkeypatch):
    told: list[events.Event] = []
    monkeypatch.setattr(rptrain.train.watchdog, "POLL", 0.01)
    with Watchdog() as watchdog, watchdog.watching(watched(tmp_path, told)):
        watchdog.configure(0.05, "report")
        tools.wait_for(lambda: len(told) == 1)
        time.sleep(0.2)
        assert len(told) == 1
        watchdog.heartbeat(7)
        tools.wait_for(lambda: len(told) == 2)
    assert [event.step for event in told if isinstance(event, events.Stalled)] == [0, 7]


def test_without_a_limit_nothing_is_told(tmp_path):
    told: list[events.Event] = []
    before = {*threading.enumerate()}
    with Watchdog() as watchdog, watchdog.watching(watched(tmp_path, told)):
        watchdog.configure(0, "stop")
        time.sleep(0.1)
    assert not told and {*threading.enumerate()} <= before


def test_a_stall_in_a_folder_that_was_deleted_is_told_in_a_warning(tmp_path, caplog):
    told: list[events.Event] = []

    def check() -> None:
        raise RunDeleted("the run's folder was deleted")

    with Watchdog() as watchdog, watchdog.watching(watched(tmp_path, told, check)):
        watchdog.configure(0.01, "report")
        tools.wait_for(lambda: len(caplog.messages) == 1)
    assert caplog.messages == ["no progress for 0.01 seconds while starting, and the run's folder was deleted"]
    assert not told and not list(tmp_path.iterdir())
