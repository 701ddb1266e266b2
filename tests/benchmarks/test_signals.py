"""What the benchmark of signals and kills takes for a fault."""

import shutil
from dataclasses import replace

import pytest

from benchmarks.signals import kills
from benchmarks.signals.cases import Case, Outcome, Sent, problems
from benchmarks.signals.process import Usual
from rptrain.runs.folder.run_dir import RunDir

from .. import run_tools as tools

LONGEST = Usual(life=10.0, run=5.0, closing=0.5, step=0.1, save=0.2)
STOPPED = Outcome(
    Case("life", 5.0, ("SIGINT",), (0.0,)),
    (Sent("SIGINT", 5.0, "training"),),
    code=130,
    seconds=1.5,
    delay=0.0,
    record="Stopped",
    saved=True,
    message="interrupted",
    traceback=False,
)
TWICE = replace(STOPPED, sent=STOPPED.sent * 2, seconds=0.9, saved=False)
CLOSED = replace(
    STOPPED, sent=(Sent("SIGTERM", 9.9, "closing"),), code=0, seconds=1.4, record="Finished", saved=False, message=""
)
BEFORE = replace(STOPPED, sent=(Sent("SIGTERM", 0.02, "before main"),), code=-15, record="", saved=False, message="")


@pytest.mark.parametrize("outcome", [STOPPED, TWICE, CLOSED, BEFORE], ids=("stopped", "twice", "closed", "before"))
def test_ends_as_promised(outcome):
    assert list(problems(outcome, LONGEST)) == []


@pytest.mark.parametrize(
    ("outcome", "changes", "problem"),
    [
        (STOPPED, {"seconds": 1.7}, "late: 1.70 s, not 1.60 s"),
        (STOPPED, {"saved": False}, "not saved after the last step"),
        (STOPPED, {"code": 1}, "code 1"),
        (STOPPED, {"code": 0}, "code 0"),
        (STOPPED, {"record": "Step"}, "the last record is Step"),
        (STOPPED, {"message": ""}, "without a message"),
        (STOPPED, {"traceback": True}, "a traceback"),
        (TWICE, {"seconds": 1.1}, "late: 1.10 s, not 1.00 s"),
        (CLOSED, {"code": -15}, "code -15"),
        (BEFORE, {"code": -9}, "it hangs"),
    ],
)
def test_what_is_not_as_promised(outcome, changes, problem):
    assert list(problems(replace(outcome, **changes), LONGEST)) == [problem]


def test_a_resumed_run_is_compared(tmp_path):
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, *kills.SETTINGS, "train.max_steps=4")
    weights, losses = tools.state(run), tools.steps(run)
    assert list(kills.differences(tmp_path, 0, weights, losses)) == []
    name = next(iter(weights))
    assert len([*kills.differences(tmp_path, 1, weights | {name: b""}, losses | {1: losses[2]})]) == 3
    (run.checkpoints_path / ".checkpoint-4.rptrain-partial").mkdir()
    assert len([*kills.differences(tmp_path, 0, weights, losses)]) == 1
    shutil.rmtree(run.path)
    RunDir.create(tmp_path / "runs", "run")
    assert list(kills.differences(tmp_path, 0, weights, losses)) == ["no run is finished"]
