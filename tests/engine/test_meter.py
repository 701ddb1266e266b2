"""What the engine measures: every layer both ways, copies, updates; and that measuring changes nothing."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from rptrain.engine.devices import cpu
from rptrain.engine.meter import Measured, Meter, timed
from rptrain.engine.store import ModelStore
from rptrain.models.layers.mlp import Block, Head
from tests.cases import UPDATES

from . import plain, runs

CFG = plain.config()
PLANS = ["F0-1 F2-3 FB4-4 B2-3 B0-1", "F0-2 FB3-4 B2-2 B1-1 B0-0", "FB0-4"]
PAUSE = 0.02


def measure(store, plan=f"{PLANS[0]} | N=2 M=4 MR=4", steps=3, **options) -> Measured | None:
    with runs.engine_of(store, plan, tokens=32, meter=Meter(), **options) as engine:
        for batch in plain.make_batches(steps):
            engine.forward_backward(batch)
            engine.step(1e-3)
        engine.synchronize()
        return engine.measured()


def made(**options) -> ModelStore:
    return runs.make_store(CFG, torch.float32, asynchronous=True, **options)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("rounds", [1, 2])
def test_every_layer_has_both_times_in_every_plan(plan, rounds):
    with made(wide_grad=rounds > 1) as store:
        found = measure(store, f"{plan} | N=2 M=4 MR={4 // rounds}")
    assert found is not None
    assert len(found.forward) == len(found.backward) == 5
    assert min(found.forward[:4]) > 0 and found.forward[4] == 0
    assert min(found.backward) > 0
    assert found.upload is not None and found.upload > 0
    assert found.download is not None and found.download > 0
    assert found.update > 0
    assert found.steps == 2, "the first is left out"


class Clock(threading.local):
    """A time for each thread that goes on where a layer says so, and a little with every stamp."""

    now = 0.0

    def stamp(self):
        at = self.now = self.now + 2**-20
        return lambda: at


CLOCK = Clock()


class Counted(Block):
    """A block that takes 1 forward and 10 backward on the clock."""

    scale = 1

    def forward(self, *arguments):
        CLOCK.now += self.scale
        return super().forward(*arguments)

    def forward_saved(self, *arguments):
        CLOCK.now += self.scale
        return super().forward_saved(*arguments)

    def backward(self, *arguments):
        CLOCK.now += 10 * self.scale
        return super().backward(*arguments)


class Slow(Counted):
    scale = 3


class CountedHead(Head):
    def loss_backward(self, *arguments):
        CLOCK.now += 7
        return super().loss_backward(*arguments)


@pytest.mark.parametrize("plan", PLANS)
def test_each_layer_has_its_own_time_and_backward_none_of_the_recomputed_forward(plan, monkeypatch):
    monkeypatch.setattr(cpu, "stamp", CLOCK.stamp)
    with made() as store:
        kinds = [Counted, Counted, Slow, Counted]
        layers = tuple(kind(**vars(layer)) for kind, layer in zip(kinds, store.spec.layers, strict=True))
        store.spec = replace(store.spec, layers=layers, head=CountedHead(**vars(store.spec.head)))
        found = measure(store, f"{plan} | N=2 M=4 MR=4")
    assert found is not None
    assert found.forward == pytest.approx((1, 1, 3, 1, 0), abs=1e-3)
    assert found.backward == pytest.approx((10, 10, 30, 10, 7), abs=1e-3)


def test_layers_that_differ_in_name_and_place_only_share_their_times():
    with made() as store:
        other = replace(store.spec.layers[1], eps=0.5)
        store.spec = replace(store.spec, layers=(store.spec.layers[0], other, *store.spec.layers[2:]))
        found = measure(store)
    assert found is not None
    for times in (found.forward, found.backward):
        assert times[0] == times[2] == times[3] != times[1]


def test_a_slow_copy_is_a_slow_rate_and_a_slow_update_a_long_one(monkeypatch):
    copy = torch.Tensor.copy_

    def slow(target, source, non_blocking=False):
        if non_blocking and source.dim() == 1 and source.numel() > 1000:  # parameters and gradients, not activations
            time.sleep(PAUSE)
        return copy(target, source, non_blocking)

    def probe(where):
        if where.startswith("optimizer"):
            time.sleep(PAUSE)

    with made() as store:
        largest = max(unit.numel for unit in store.spec.units) * 4
        monkeypatch.setattr(torch.Tensor, "copy_", slow)
        found = measure(store, probe=probe)
        units = len(store.units)
    assert found is not None
    assert found.upload < largest / PAUSE and found.download < largest / PAUSE
    assert found.update >= units * PAUSE


def test_without_a_complete_step_after_the_first_there_is_nothing():
    with made() as store:
        assert measure(store, steps=1) is None
        with runs.engine_of(store, f"{PLANS[0]} | N=2 M=4 MR=4", tokens=32) as engine:
            assert engine.measured() is None


def test_a_step_that_was_skipped_does_not_count():
    batches = plain.make_batches(4)
    with made() as store, runs.engine_of(store, f"{PLANS[0]} | N=2 M=4 MR=4", tokens=32, meter=Meter()) as engine:
        for step, batch in enumerate(batches):
            engine.forward_backward(batch)
            engine.step(1e38 if step == 0 else 1e-3)
        engine.synchronize()
        measured = engine.measured()
    assert measured is not None
    assert measured.steps == 1, "the weights after the first step, which step 3 is the first to read, are not finite"


def test_nothing_is_measured_after_the_times_were_asked_for():
    batches = plain.make_batches(4)
    with made() as store, runs.engine_of(store, f"{PLANS[0]} | N=2 M=4 MR=4", tokens=32, meter=Meter()) as engine:
        for step, batch in enumerate(batches):
            engine.forward_backward(batch)
            engine.step(1e-3)
            engine.synchronize()
            if step >= 1:
                assert engine.measured().steps == 1


@UPDATES
def test_measuring_changes_no_bit(asynchronous):
    batches = plain.make_batches(4)
    plan = f"{PLANS[0]} | N=2 M=4 MR=4"
    without, *others = (
        runs.run(CFG, batches, plan, asynchronous=asynchronous, dtype=torch.bfloat16, meter=meter)
        for meter in (None, Meter(), Meter(layers=False))
    )
    for measured in others:
        assert measured[:2] == without[:2]
        assert all(torch.equal(measured[2][name], without[2][name]) for name in without[2])


def test_layers_need_not_be_measured():
    plan, batches = f"{PLANS[0]} | N=2 M=4 MR=4", plain.make_batches(3)
    meter = Meter(layers=False)
    with made() as store, runs.engine_of(store, plan, tokens=32, meter=meter) as engine:
        for batch in batches:
            engine.forward_backward(batch)
            engine.step(1e-3)
        engine.synchronize()
        measured = engine.measured()
    assert measured is not None and measured.forward == measured.backward == ()
    assert {reading.kind for reading in meter.readings} == {"upload", "download", "update"}
    assert measured.upload and measured.download and measured.update


def test_the_median_leaves_a_single_late_reading_out(monkeypatch):
    """Stamps of a stream that is read by hand: seconds by layer, and bytes by second."""
    now = [0.0]

    def stamp():
        at = now[0]
        return lambda: at

    def read(iteration, kind, subject, seconds):
        with timed(meter, stamp, iteration, kind, subject):
            now[0] += seconds

    with made() as store:
        meter, spec = Meter(), store.spec
    for iteration in range(4):
        for layer in range(5):
            late = 100.0 if (iteration, layer) == (2, 1) else 0.0
            read(iteration, "backward", layer, 2.0 + late)
            if layer < 4:
                read(iteration, "forward", layer, 1.0 + late)
        read(iteration, "upload", 30, 2.0)
        read(iteration, "upload", 10, 2.0 * iteration)
        if iteration < 3:  # the last step is under way
            read(iteration, "update", 0, float(iteration))
    assert meter.measured(spec) == Measured((1.0,) * 4 + (0.0,), (2.0,) * 5, (40 / 4 + 40 / 6) / 2, None, 1.5, 2)
