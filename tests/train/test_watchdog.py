"""A stall is reported with what every thread and stream waits for; training continues."""

import threading
import time
from pathlib import Path
from unittest.mock import Mock

from rptrain.engine.devices.cuda import CudaStream
from rptrain.engine.stage_pass import StagePass
from rptrain.runs import events
from rptrain.runs.run_dir import RunDir
from rptrain.train.watchdog import Watchdog
from rptrain.utils.errors import RunDeleted

from .. import run_tools as tools


def test_a_hanging_computation_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    """A pass over the head in the second step waits until the record of it is there.

    It waits in one call: the stack of a thread that runs on meanwhile may lack frames. A busy machine may stall other
    steps too.
    """
    head, enter, dump, calls, watchdogs, told = StagePass._head, Watchdog.__enter__, Watchdog._dump, [], [], []
    run, dumped = RunDir(tmp_path / "runs/run"), threading.Event()

    def remembered(watchdog):
        watchdogs.append(watchdog)
        return enter(watchdog)

    def dumps(watchdog):
        dump(watchdog)
        dumped.set()

    def hangs(work, scale, loss):
        calls.append(None)
        if len(calls) == 4 + 3:
            with watchdogs[-1]._changed:  # none is told meanwhile
                dumped.clear()
                watchdogs[-1].heartbeat(1)
            assert dumped.wait(tools.PATIENCE)
            with watchdogs[-1]._changed:
                stalled = tools.events(run, events.Stalled)[-1]
                told.append((stalled, Path(stalled.path).read_text()))
        head(work, scale, loss)

    monkeypatch.setattr(Watchdog, "__enter__", remembered)
    monkeypatch.setattr(Watchdog, "_dump", dumps)
    monkeypatch.setattr(StagePass, "_head", hangs)
    tools.write_model(tmp_path / "model")
    tools.train_here(tmp_path, "engine.stall_timeout=0.7", "optim.update=sync")
    ((stalled, text),) = told
    assert stalled.step == 1
    assert "has work" in [stalled.waiting.get(f"cpu:{index} compute stream") for index in (0, 1)]
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


def test_each_stall_is_told_once(tmp_path):
    told: list[events.Event] = []
    with Watchdog(0.05, tmp_path, lambda: {}, told.append, lambda: None) as watchdog:
        tools.wait_for(lambda: len(told) == 1)
        time.sleep(0.2)
        assert len(told) == 1
        watchdog.heartbeat(7)
        tools.wait_for(lambda: len(told) == 2)
    assert [event.step for event in told if isinstance(event, events.Stalled)] == [0, 7]
    before = {*threading.enumerate()}
    with Watchdog(0, tmp_path, lambda: {}, told.append, lambda: None):
        assert {*threading.enumerate()} <= before


def test_a_stall_in_a_folder_that_was_deleted_is_told_in_a_warning(tmp_path, caplog):
    told: list[events.Event] = []

    def check() -> None:
        raise RunDeleted("the run's folder was deleted")

    with Watchdog(0.01, tmp_path, lambda: {}, told.append, check):
        tools.wait_for(lambda: len(caplog.messages) == 1)
    assert caplog.messages == ["no step finished for 0.01 seconds, and the run's folder was deleted"]
    assert not told and not list(tmp_path.iterdir())
