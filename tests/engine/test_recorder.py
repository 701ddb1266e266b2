"""What a watched engine says of itself: what a device computes or waits for, and how long it was busy."""

import threading
import time
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rptrain.engine import recorder
from rptrain.engine.worker import MICRO_BATCHES_AHEAD
from rptrain.schedule.plan import Plan

from .. import run_tools as tools
from . import plain, runs

CFG = plain.config()
TWO = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"
PAUSE = 0.05


class Gate:
    """A probe that holds up whoever comes to a place, until it is opened."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, where: str) -> None:
        if where == self._place and not self.opened.is_set():
            self.reached.set()
            assert self.opened.wait(tools.PATIENCE)


def watched(gate, look, *, asynchronous=True):
    """What `look` makes of the engine while the gate holds it up."""
    with (
        runs.make_store(CFG, torch.float32, asynchronous=asynchronous) as store,
        runs.engine_of(store, TWO, tokens=32, asynchronous=asynchronous, probe=gate, watched=True) as engine,
    ):
        for batch in plain.make_batches(2):
            engine.forward_backward(batch)
            engine.step(1e-3)
        assert gate.reached.wait(tools.PATIENCE)
        found = look(engine)
        gate.opened.set()
        engine.synchronize()
        assert all(
            len(recorder._in_progress) <= MICRO_BATCHES_AHEAD for recorder in engine._context.recorder.devices
        ), "what is done is not kept"
        return found, engine.activity()


def test_a_device_that_computes():
    slot = "0:F0-1@0r0m0-3"
    gate = Gate(f"{slot} micro-batch 2")

    def look(engine):
        tools.wait_for(lambda: at_rest(engine) and others_wait(engine.activity()))
        first = engine.activity()
        time.sleep(PAUSE)
        return first, engine.activity()

    def at_rest(engine):
        """Both devices have begun the last micro-batch that they can begin: nothing finishes until the gate is open."""
        begun = [tuple(recorder._in_progress)[-1:] for recorder in engine._context.recorder.devices]
        return all(newest and newest[0].micro_batch == 3 for newest in begun)

    def others_wait(found):
        receiving = found.optimizer.startswith("receiving gradient")
        return found.queue == 2 and receiving and found.lanes[1].waiting is not None

    (first, second), after = watched(gate, look)
    lane = first.lanes[0]
    assert lane.current is not None and (str(lane.current.slot), lane.current.micro_batch) == (slot, 2)
    assert lane.computing and lane.waiting is None and lane.current.iteration == 0
    assert second.lanes[0].busy["F"] - lane.busy["F"] > 0.9 * PAUSE, "what is not over counts up to now"
    assert lane.busy["B"] == 0
    other = second.lanes[1]
    assert not other.computing and other.waiting in ("activations", "inputs")
    assert first.update_seconds is None
    assert after.queue == 0 and after.update_seconds > 0
    assert after.lanes[0].busy["F"] >= second.lanes[0].busy["F"], "finished micro-batches count"
    assert all(min(lane.busy.values()) >= 0 and sum(lane.busy.values()) > 0 for lane in after.lanes)


def test_the_computations_of_the_last_iterations():
    """Of each micro-batch of each slot, in order; older ones are forgotten."""
    count = recorder.KEPT + 3
    with (
        runs.make_store(CFG, torch.float32, asynchronous=True) as store,
        runs.engine_of(store, TWO, tokens=32, asynchronous=True, watched=True) as engine,
    ):
        for batch in plain.make_batches(count):
            engine.forward_backward(batch)
            engine.step(1e-3)
        engine.synchronize()
        found = engine.computations()
    plan = Plan.parse(TWO)
    for device, lane in enumerate(found):
        assert all(one.start <= one.end for one in lane)
        assert all(one.end <= after.start for one, after in pairwise(lane))
        slots = [
            (iteration, slot.index)
            for iteration in range(count - recorder.KEPT, count)
            for slot in plan.slots(iteration)
            if slot.device == device
        ]
        passes = Counter((one.iteration, one.slot) for one in lane)
        assert sorted(passes) == slots and all(passes[slot] >= 4 for slot in slots)


def test_devices_that_wait_for_the_optimizer():
    gate = Gate("optimizer update of layers.1")

    def look(engine):
        tools.wait_for(lambda: any(map(starves, engine.activity().lanes, engine._context.recorder.devices)))
        began = time.perf_counter()
        found = engine.activity()
        time.sleep(PAUSE)
        return engine, engine.starved, time.perf_counter() - began, found

    def starves(lane, device):
        """Whether it waits, and has computed all that was issued: only then does its time count."""
        ends = [end for one in tuple(device._in_progress) for _, end in tuple(one.pieces)]
        return lane.waiting == "the optimizer" and all(end.passed() for end in ends)

    (engine, before, waited, found), after = watched(gate, look, asynchronous=False)
    assert found.optimizer == "update of layers.1" and found.queue == 2
    assert after.queue == 0
    assert engine.starved - before > waited / 2, "on average over two devices, at least one of which has waited"


def test_a_device_that_has_something_to_compute_is_not_starved(monkeypatch):
    now = iter([10.0, 14.0, 20.0, 23.0, 30.0, 35.0])
    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    device = recorder.DeviceRecorder(recorder.Recorder(1), watched=True)
    computed = SimpleNamespace(pieces=[(None, Mark(12.0))])
    still = SimpleNamespace(pieces=[(None, Mark(None))])
    for in_progress, starved in (((), 4.0), ((still,), 4.0), ((computed, SimpleNamespace(pieces=[])), 9.0)):
        device._in_progress.extend(in_progress)
        with device.waiting_for_optimizer():
            pass
        assert device.starved == starved
        device._in_progress.clear()


class Mark:
    """The end of a computation, if it has ended."""

    def __init__(self, seconds):
        self._seconds = seconds

    def passed(self):
        return self._seconds is not None

    def __call__(self):
        return self._seconds


def test_bytes_that_are_copied():
    batches, counts = plain.make_batches(4), []
    with (
        runs.make_store(CFG, torch.float32, asynchronous=True) as store,
        runs.engine_of(store, "F0-3 FB4-4 B0-3 | N=1 M=4 MR=4", tokens=32, watched=True) as engine,
    ):
        for batch in batches:
            engine.forward_backward(batch)
            engine.step(1e-3)
            engine.synchronize()
            (lane,) = engine.activity().lanes
            counts.append((lane.up, lane.down))
        layers = [4 * sum(store.spec.units[index].numel for index in layer.units) for layer in store.spec.stack]
        boundary = 4 * 4 * 32 * store.spec.hidden_size
    moved = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(counts)]
    *blocks, head = layers
    assert set(moved) == {(2 * sum(blocks) + head + 4 * boundary, sum(blocks) + head + 3 * boundary)}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_being_watched_changes_no_bit(asynchronous):
    batches = plain.make_batches(4)
    without, with_lanes = (
        runs.run(CFG, batches, TWO, asynchronous=asynchronous, dtype=torch.bfloat16, watched=w, max_grad_norm=1.0)
        for w in (False, True)
    )
    assert with_lanes[:2] == without[:2]
    assert all(torch.equal(with_lanes[2][name], without[2][name]) for name in without[2])
