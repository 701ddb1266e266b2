"""Trackers get the metrics of every event; a missing one is reported before anything is loaded."""

import logging
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rptrain.inference import samples
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train import session
from rptrain.train.trackers import FLUSH, Trackers
from rptrain.utils.errors import UserError

from .. import run_tools as tools


class Fake(ModuleType):
    """Stands for all three: notes what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.opened: list[dict[str, Any]] = []
        self.values: dict[tuple[str, int], Any] = {}
        self.defined: list[tuple[str, dict[str, Any]]] = []  # metrics
        self.closed = 0

    def init(self, **settings: Any) -> SimpleNamespace:
        self.opened.append(settings)
        return SimpleNamespace(log=self.log, finish=self.finish, define_metric=self.define)

    def define(self, name: str, **settings: Any) -> None:
        self.defined.append((name, settings))

    def SummaryWriter(self, **settings: Any) -> SimpleNamespace:
        self.opened.append(settings)

        def add(name: str, value: Any, step: int) -> None:
            self.log({name: value}, step)

        return SimpleNamespace(add_scalar=add, add_text=add, close=self.finish)

    def Table(self, columns: list[str], data: list[list[Any]]) -> str:
        return repr([dict(zip(columns, row, strict=True)) for row in data])

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """W&B gets the step as a metric."""
        step = values["train/global_step"] if step is None else step
        self.values |= {(name, step): value for name, value in values.items() if name != "train/global_step"}

    def finish(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_what_a_tracker_gets(name, module, tmp_path, monkeypatch):
    fake = Fake(module)
    monkeypatch.setitem(sys.modules, module, fake)
    tools.write_model(tmp_path / "model")
    settings = (f'log.report_to=["{name}"]', "log.logging_steps=2", "train.max_steps=4", "log.project=mine")
    monkeypatch.setattr(samples, "MAX_NEW_TOKENS", 2)
    run = tools.train_here(tmp_path, *settings, "data.val_size=0.3", 'log.sample_prompts=["x", "y"]')
    recorded = {
        (f"train/{key}", event.step): getattr(event, key)
        for event in tools.events(run, events.Step)
        for key in ("loss", "grad_norm", "learning_rate", "epoch", "tokens_per_second")
        if key != "tokens_per_second" or not event.warm_up
    }
    (validated,) = tools.events(run, events.Evaluation)
    config, answers = fake.values.pop(("config", 0), None), [fake.values.pop((f"samples/{n}", 4)) for n in (1, 2)]
    assert fake.values == recorded | {("eval/loss", 4): validated.score} and len(recorded) == 9 and fake.closed == 1
    for answer, prompt, event in zip(answers, "xy", tools.events(run, events.Sample), strict=True):
        assert event.prompt == prompt and prompt in answer and event.text in answer
    (opened,) = fake.opened
    if name == "tensorboard":
        assert opened == {"logdir": str(run.path / "tensorboard"), "flush_secs": FLUSH} and '"max_steps": 4' in config
        assert not logging.getLogger("tensorboardX.x2num").isEnabledFor(logging.WARNING)
    else:
        assert (opened["project"], opened["name"], opened["config"]["train"]["max_steps"]) == ("mine", "run", 4)


def test_what_a_resumed_run_logs_again_takes_the_place_of_what_was_logged(tmp_path, monkeypatch):
    """TensorBoard hides steps after the checkpoint; W&B, whose own steps only increase, has the step as a metric."""
    board, wandb, failed = Fake("tensorboardX"), Fake("wandb"), list[events.Event]()
    for module in (board, wandb):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = tools.write_config(tmp_path, 'log.report_to=["tensorboard", "wandb"]').config
    run = RunDir(tmp_path)
    run.checkpoints_path.mkdir()
    tools.write_checkpoint(run.checkpoint_path(3))
    steps = [events.Step(step, float(step), 1e-3, 1.0, 8, 8, 100.0) for step in (5, 4)]
    with Trackers(config, run, failed.append, patience=tools.PATIENCE) as trackers:
        for step in steps:
            trackers.hear(step)
    assert failed == [] and board.opened[0]["purge_step"] == 4
    assert wandb.defined == [("train/global_step", {}), ("*", {"step_metric": "train/global_step", "step_sync": True})]
    assert all(fake.values["train/loss", step] == step for fake in (board, wandb) for step in (4, 5))


class Broken(RuntimeError):
    """Of the tracker's own."""


@pytest.mark.parametrize("bad", ["init", "log", "finish"])
@pytest.mark.parametrize(
    ("error", "message"),
    [(Broken("no server"), "Broken: no server"), (SystemExit(3), "SystemExit: 3")],
    ids=["error", "exit"],
)
def test_a_tracker_that_raises_is_told_once_and_the_run_goes_on_with_the_others(
    bad, error, message, tmp_path, monkeypatch
):
    def broken(*values: Any, **named: Any) -> None:
        calls.append(values)
        raise error

    calls: list[Any] = []
    fake, good = Fake("wandb"), Fake("trackio")
    setattr(fake, bad, broken)
    for module in (fake, good):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, 'log.report_to=["wandb", "trackio"]')
    assert [(event.name, event.message) for event in tools.events(run, events.TrackerFailed)] == [("wandb", message)]
    assert len(calls) == 1 and run.finished and len(good.values) == 5 * 6 - 2 and (good.closed, fake.closed) == (1, 0)


@pytest.mark.parametrize(("bad", "does"), [("init", "open"), ("log", "close"), ("finish", "close")])
def test_a_tracker_that_hangs_is_left_behind(bad, does, tmp_path, monkeypatch):
    fake, ends = Fake("wandb"), threading.Event()
    setattr(fake, bad, lambda *values, **named: ends.wait())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(session, "PATIENCE", 0.3)
    tools.write_model(tmp_path / "model")
    try:
        run = tools.train_here(tmp_path, 'log.report_to=["wandb"]')
    finally:
        ends.set()
    assert run.finished
    (failed,) = tools.events(run, events.TrackerFailed)
    assert (failed.name, failed.message) in [
        ("wandb", f"did not {does} within 0.3 seconds"),
        ("wandb", "did not answer within 0.3 seconds"),  # if the steps took as long
    ]


def test_a_tracker_that_hangs_is_noticed_during_the_run(tmp_path, monkeypatch):
    """By the next metrics, not only when it is closed."""
    fake, ends, told = Fake("wandb"), threading.Event(), list[events.Event]()
    entered = threading.Event()
    fake.log = lambda values: (entered.set(), ends.wait())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    step = events.Step(1, 2.0, 1e-3, 1.0, 8, 8, 100.0)
    config = tools.write_config(tmp_path, 'log.report_to=["wandb"]').config
    try:
        with Trackers(config, RunDir(tmp_path), told.append, patience=0.2) as trackers:
            trackers.hear(step)
            assert entered.wait(tools.PATIENCE)
            time.sleep(0.3)
            trackers.hear(step)
            assert [event.message for event in told] == ["did not answer within 0.2 seconds"]
    finally:
        ends.set()
    assert len(told) == 1


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("rptrain.preflight.checks.find_spec", lambda name: None)
    tools.write_model(tmp_path / "model")
    with pytest.raises(UserError, match=r'names "wandb", but wandb is not installed: pip install "rptrain\[wandb\]"'):
        tools.train_here(tmp_path, 'log.report_to=["wandb"]')
    assert not (tmp_path / "runs").exists()
