"""The model that sleeps in place of computing, and what its processes need. Times are not measured here."""

from dataclasses import replace

import pytest

from benchmarks.network import model, namespaces
from benchmarks.network.model import WORLD, Sleeps, batch, planned, sleeping_model
from rptrain.engine.distributed.shared import Shared
from rptrain.engine.engine import Devices, Engine
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.optimizer import Optimizer
from rptrain.schedule.machine import GOODPUT
from tests.engine.distributed.test_exactness import together


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_two_processes_train_it(asynchronous, monkeypatch):
    monkeypatch.setitem(model.CONFIG, "num_hidden_layers", 2)
    sleeps = Sleeps(1e-4, 1e-4, 1e-4)

    def train(peers):
        shared = Shared.open(peers, WORLD)
        run = planned(sleeps, asynchronous=asynchronous, rate=1e9)
        with ModelStore(sleeping_model(sleeps), replace(run.layout, share=shared.share)) as store:
            for state in store.units:
                for params in state.params:
                    params.fill_(0.5)
            store.loaded()
            with Engine(store, run.plan, Devices(["cpu:0"], run.device), Optimizer(), partners=shared) as engine:
                losses = []
                for _ in range(2):
                    losses.append(engine.forward_backward(batch()))
                    update = engine.step(1e-3)
                return [loss.result() for loss in losses], update.result().grad_norm

    assert together(WORLD, train) == [([1.0 * 4 / batch().supervised] * 2, 0.0)] * WORLD


@pytest.mark.parametrize("rate", [None, 1e6])
def test_its_plan_counts_sleeps_or_messages(rate):
    """A step sleeps in two micro-batches of ten layers, or exchanges 4 + 2 bytes for half of the parameters."""
    run = planned(Sleeps(0.005, 0.01, 0.02), asynchronous=True, rate=rate)
    numel = sum(unit.numel for unit in sleeping_model(Sleeps(0, 0, 0)).units)
    expected = 2 * (10 * 0.015 + 0.02) if rate is None else 3 * numel / (GOODPUT * 1e6)
    assert run.estimate.period == pytest.approx(expected, rel=0.1)


def test_without_its_tools_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(namespaces.Unavailable, match="this needs root, and ip and tc"), namespaces.joined():
        pass
