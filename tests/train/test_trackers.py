"""Trackers get the metrics of every event; a missing one is reported before anything is loaded."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rptrain.runs import events
from rptrain.utils.errors import UserError

from .. import run_tools as tools


class Fake(ModuleType):
    """Stands for all three: notes what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.opened: list[dict[str, Any]] = []
        self.values: dict[tuple[str, int], float] = {}
        self.closed = 0

    def init(self, **settings: Any) -> SimpleNamespace:
        self.opened.append(settings)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def SummaryWriter(self, **settings: Any) -> SimpleNamespace:
        self.opened.append(settings)
        return SimpleNamespace(add_scalar=lambda name, value, step: self.log({name: value}, step), close=self.finish)

    def log(self, values: dict[str, float], step: int) -> None:
        self.values |= {(name, step): value for name, value in values.items()}

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
    run = tools.train_here(tmp_path, *settings)
    recorded = {
        (f"train/{key}", event.step): getattr(event, key)
        for event in tools.events(run, events.Step)
        for key in ("loss", "grad_norm", "learning_rate", "tokens_per_second")
    }
    assert fake.values == recorded and len(recorded) == 8 and fake.closed == 1
    (opened,) = fake.opened
    if name == "tensorboard":
        assert opened == {"logdir": str(run.path / "tensorboard")}
    else:
        assert (opened["project"], opened["name"], opened["config"]["train"]["max_steps"]) == ("mine", "run", 4)


@pytest.mark.parametrize("bad", ["log", "finish"])
def test_a_tracker_that_raises_is_told_once_and_the_run_goes_on_with_the_others(bad, tmp_path, monkeypatch, caplog):
    class Broken(RuntimeError):
        """Of the tracker's own."""

    def broken(*values: Any, **named: Any) -> None:
        calls.append(values)
        raise Broken("no server")

    calls: list[Any] = []
    fake, good = Fake("wandb"), Fake("trackio")
    setattr(fake, bad, broken)
    for module in (fake, good):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, 'log.report_to=["wandb", "trackio"]')
    told = [f"{event.name}: {event.message}" for event in tools.events(run, events.TrackerFailed)] + caplog.messages
    assert told == ["wandb: Broken: no server" if bad == "log" else "wandb could not be closed: Broken: no server"]
    assert (
        len(calls) == 1
        and run.finished
        and len(good.values) == 4 * 6
        and (good.closed, fake.closed) == (1, int(bad == "log"))
    )


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("rptrain.train.trackers.find_spec", lambda name: None)
    tools.write_model(tmp_path / "model")
    with pytest.raises(UserError, match=r'names "wandb", but wandb is not installed: pip install "rptrain\[wandb\]"'):
        tools.train_here(tmp_path, 'log.report_to=["wandb"]')
    assert not (tmp_path / "runs").exists()
