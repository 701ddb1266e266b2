"""The soak sees what is left behind, and records that are missing, double or not finite."""

import fcntl
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace

import pytest

from benchmarks.holdings import added, counts, holdings
from benchmarks.soak import recorded
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events

from .. import run_tools as tools

SETTINGS = (
    "train.max_steps=4",
    "data.val_size=0.3",
    "train.eval_steps=2",
    "save.save_steps=2",
    "log.logging_steps=1",
)


def test_what_is_left_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = holdings()
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    child = subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with open(tmp_path / "file", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        names = added(before, holdings())
    file_name = str(tmp_path / "file")
    assert len(names["threads"]) == 1 and names["child processes"] == [str(child.pid)]
    assert names["locks"] == names["temporary files"] == [file_name]
    assert sorted(names["descriptors"]) == [file_name, "pipe:[]"]
    ends.set()
    thread.join()
    child.communicate(b"\n")
    (tmp_path / "file").unlink()
    assert counts(holdings()) == counts(before)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run whose records are those of one that was stopped after its fourth step."""
    folder = tmp_path_factory.mktemp("stopped")
    tools.write_model(folder / "model")
    run = tools.train_here(folder, *SETTINGS)
    *found, _ = events.read(run.events_path)
    return run, [*found, events.Stopped(4, "STOP")]


def problems(stopped, changed: list[events.Event]) -> list[str]:
    run: RunDir = stopped[0]
    run.events_path.write_text("".join(events.to_line(event) + "\n" for event in changed))
    return list(recorded(run, run.config(), 0, {}))


def test_records_of_every_step(stopped):
    found = stopped[1]
    assert problems(stopped, found) == []
    step = next(event for event in found if isinstance(event, events.Step) and event.step == 2)
    at = found.index(step)
    for changed, message in [
        ([*found[:at], *found[at + 1 :]], "the steps of Step"),
        ([*found[:at], step, *found[at:]], "the steps of Step"),
        ([*found[:at], replace(step, loss=None), *found[at + 1 :]], "not finite"),
        ([*found[:at], events.Paused(1), *found[at:]], "0 pauses"),
        ([*found[:at], events.SaveFailed(2, "disk full"), *found[at:]], "disk full"),
        (found[:-1], "the last record"),
    ]:
        (said,) = problems(stopped, changed)
        assert message in said
