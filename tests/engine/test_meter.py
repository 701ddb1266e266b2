"""What the engine measures: every layer both ways, copies, updates; and that measuring changes nothing."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from rptrain.engine.devices import cpu
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.meter import Measured, Meter, measured_stages, timed
from rptrain.engine.recorder import Recorder
from rptrain.models.families.registry import build
from rptrain.models.layers.block import Block
from rptrain.models.layers.head import Head
from rptrain.models.layers.norms import Norms
from rptrain.schedule.plan import Plan
from tests.cases import UPDATES, grid

from . import plain, runs

CFG = plain.config()
PLANS = ["F0-1 F2-3 FB4-4 B2-3 B0-1", "F0-2 FB3-4 B2-2 B1-1 B0-0", "FB0-4"]
PAUSE = 0.02


def measure(store, plan=f"{PLANS[0]} | N=2 M=4 MR=4", steps=None, meter=None, **options) -> Measured | None:
    """By default, runs two steps for each measured stage after the warm-up."""
    meter = meter or Meter()
    steps = steps or meter.warm_up + 2 * len(measured_stages(store.spec, Plan.parse(plan).stages))
    with runs.engine_of(store, plan, tokens=32, meter=meter, **options) as engine:
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
    assert found.steps == (4 if plan == PLANS[0] else 2), "the first is left out"


class Clock(threading.local):
    """A time for each thread that goes on where a layer says so, and a little with every stamp."""

    now = 0.0

    def stamp(self):
        at = self.now = self.now + 2**-20
        return lambda: at


CLOCK = Clock()


class Counted(Block):
    """A block that takes 1 forward and 10 backward on the clock."""

    slowness = 1

    def forward(self, *arguments):
        CLOCK.now += self.slowness
        return super().forward(*arguments)

    def forward_saved(self, *arguments):
        CLOCK.now += self.slowness
        return super().forward_saved(*arguments)

    def backward(self, *arguments):
        CLOCK.now += 10 * self.slowness
        return super().backward(*arguments)


class Slow(Counted):
    slowness = 3


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
        other = replace(store.spec.layers[1], norms=Norms(0.5))
        store.spec = replace(store.spec, layers=(store.spec.layers[0], other, *store.spec.layers[2:]))
        found = measure(store)
    assert found is not None
    for times in (found.forward, found.backward):
        assert times[0] == times[2] == times[3] != times[1]


def test_a_slow_copy_is_a_slow_rate_and_a_slow_update_a_long_one(monkeypatch):
    copy = torch.Tensor.copy_

    def slow(target, source, non_blocking=False):
        if threading.current_thread().name.endswith(("param_upload", "grad_download")):
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
        assert measure(store, steps=3, meter=Meter(warm_up=3)) is None
        with runs.engine_of(store, f"{PLANS[0]} | N=2 M=4 MR=4", tokens=32) as engine:
            assert engine.measured() is None


@pytest.mark.parametrize(("plan", "enough"), [(PLANS[1], True), (PLANS[0], False)])
def test_a_step_that_was_skipped_does_not_count(plan, enough):
    """There are no times if a kind of layer was measured in no other step."""
    batches = plain.make_batches(4)
    with made() as store, runs.engine_of(store, f"{plan} | N=2 M=4 MR=4", tokens=32, meter=Meter()) as engine:
        for step, batch in enumerate(batches):
            engine.forward_backward(batch)
            engine.step(1e38 if step == 0 else 1e-3)
        engine.synchronize()
        measured = engine.measured()
        assert {reading.iteration for reading in engine.readings if reading.kind == "update"} == {1}
    assert (measured is not None) == enough
    if measured is not None:
        assert measured.steps == 1, (
            "the weights after the first step, which step 3 is the first to read, are not finite"
        )


def test_nothing_is_measured_after_the_times_were_asked_for():
    batches = plain.make_batches(4)
    with made() as store, runs.engine_of(store, f"{PLANS[1]} | N=2 M=4 MR=4", tokens=32, meter=Meter()) as engine:
        for step, batch in enumerate(batches):
            engine.forward_backward(batch)
            engine.step(1e-3)
            engine.synchronize()
            if step >= 1:
                assert engine.measured().steps == 1


ALTERNATING = plain.GPT_OSS | {"layer_types": ["sliding_attention", "full_attention"] * 2}
DENSE = plain.QWEN3_MOE | {"mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("config", "stages", "measured"),
    [
        (CFG, "FB0-4", "FB0-4"),
        (CFG, "F0-2 FB3-4 B2-2 B1-1 B0-0", "FB3-4"),
        (CFG, "F0-1 F2-3 FB4-4 B3-3 B1-2 B0-0", "FB4-4 B1-2"),
        (CFG, "F0-1 F2-2 F3-3 FB4-4 B3-3 B2-2 B1-1 B0-0", "F2-2 FB4-4 B3-3"),
        (ALTERNATING, "FB0-4", "FB0-4"),
        (ALTERNATING, "F0-1 FB2-4 B0-1", "FB2-4"),
        (ALTERNATING, "F0-2 FB3-4 B2-2 B0-1", "FB3-4 B0-1"),
        (ALTERNATING, "F0-2 FB3-4 B1-2 B0-0", "F0-2 FB3-4 B0-0"),
        (ALTERNATING, "F0-0 F1-1 F2-2 F3-3 FB4-4 B3-3 B2-2 B1-1 B0-0", "F0-0 F1-1 FB4-4 B3-3 B2-2"),
        (ALTERNATING, "F0-0 F1-3 FB4-4 B1-3 B0-0", "FB4-4 B1-3"),
        (DENSE, "F0-1 FB2-4 B0-1", "FB2-4 B0-1"),
        (DENSE, "F0-2 FB3-4 B1-2 B0-0", "F0-2 FB3-4 B0-0"),
        (DENSE, "F0-1 F2-3 FB4-4 B2-3 B0-1", "F0-1 FB4-4 B0-1"),
    ],
)
def test_a_few_short_stages_measure_every_kind_of_layer(config, stages, measured):
    stages = Plan.parse(f"{stages} | N=1 M=4 MR=4").stages
    assert " ".join(map(str, measured_stages(build(config), stages))) == measured


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        grid(CFG, "F0-1 F2-2 F3-3 FB4-4 B3-3 B2-2 B1-1 B0-0", id="single-layers"),
        pytest.param(ALTERNATING, "F0-2 FB3-4 B1-2 B0-0", id="alternating"),
        grid(DENSE, "F0-1 F2-3 FB4-4 B2-3 B0-1", id="dense"),
    ],
)
@pytest.mark.parametrize("rounds", [1, grid(2)])
def test_one_stage_of_a_step_is_computed_layer_by_layer_and_all_layers_have_times(config, stages, rounds, monkeypatch):
    issued, layer_timer = [], Recorder.layer_timer

    def noted(recorder, stream, iteration, slot):
        timer = layer_timer(recorder, stream, iteration, slot)
        issued.append((iteration, str(slot.stage), slot.round, timer is not None))
        return timer

    monkeypatch.setattr(Recorder, "layer_timer", noted)
    meter = Meter(warm_up=2)
    with runs.make_store(config, torch.float32, asynchronous=True, wide_grad=rounds > 1) as store:
        found = measure(store, f"{stages} | N=2 M=4 MR={4 // rounds}", meter=meter)
        measured = [str(stage) for stage in measured_stages(store.spec, Plan.parse(f"{stages} | N=2 M=4 MR=4").stages)]
    steps = meter.warm_up + 2 * len(measured)
    for step in range(steps):
        stepwise = {(stage, part) for iteration, stage, part, timed in issued if iteration == step and timed}
        turn = measured[(step - meter.warm_up) % len(measured)]
        assert stepwise == ({(turn, 0)} if step >= meter.warm_up else set())
    assert {stage for _, stage, _, timed in issued if not timed} == {*stages.split()}
    assert min(reading.iteration for reading in meter.readings) == meter.warm_up
    for step in range(meter.warm_up, steps):
        layers = [r for r in meter.readings if r.iteration == step and r.kind in ("forward", "backward")]
        assert layers and len({reading.thread for reading in layers}) == 1, "of one device"
    assert found is not None and found.steps == 2 * len(measured)
    assert min(*found.forward[:-1], *found.backward) > 0


@UPDATES
def test_measuring_changes_no_bit(asynchronous):
    batches = plain.make_batches(4)
    plan = f"{PLANS[0]} | N=2 M=4 MR=4"
    without, *others = (
        runs.run(CFG, batches, plan, asynchronous=asynchronous, dtype=torch.bfloat16, meter=meter)
        for meter in (None, Meter(), Meter(warm_up=2), Meter(layers=False))
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
