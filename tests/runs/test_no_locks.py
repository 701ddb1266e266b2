"""Runs on a file system without locks: their records say whether a process trains them."""

import errno
import os
from pathlib import Path

import pytest

from rptrain.runs.folder.event_log import EventLog, check_not_training
from rptrain.runs.folder.listing import delete
from rptrain.runs.records.events import Finished, ProcessStarted, RunStarted
from rptrain.runs.records.process import ProcessId
from rptrain.utils.errors import UserError

from ..refusals import Refusals

OWN = ProcessId.of(os.getpid())
GONE = ProcessId(OWN.host, OWN.pid, "an earlier boot/1")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Refusals(monkeypatch).locking(errno.ENOLCK)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def start(run: Path, process: ProcessId) -> EventLog:
    log = EventLog(run / "events.jsonl")
    log.write(RunStarted("", "1.0", (), "", 0, 0.0))
    log.write(ProcessStarted(process.pid, process.host, process.birth, 4, 1, (), 1))
    return log


def test_a_second_process_is_refused(run: Path) -> None:
    with start(run, OWN) as log:
        assert log.no_locks == os.strerror(errno.ENOLCK)
        with (run / "events.jsonl").open("ab") as file:
            file.write(b'{"half a')  # as the first process writes it
        for use in (EventLog, check_not_training):
            with pytest.raises(UserError, match="another process is training this run"):
                use(run / "events.jsonl")
        with pytest.raises(UserError, match="another process is training this run"):
            delete(run)
    assert (run / "events.jsonl").read_bytes().endswith(b'{"half a')


@pytest.mark.parametrize("ended", [True, False], ids=["finished", "killed"])
def test_a_run_whose_process_has_ended(run: Path, ended: bool) -> None:
    with start(run, OWN if ended else GONE) as log:
        if ended:
            log.end(Finished(4))
    check_not_training(run / "events.jsonl")
    EventLog(run / "events.jsonl").close()
    delete(run)
    assert not run.exists()
