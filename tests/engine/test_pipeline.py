"""It is a pipeline, not a loop: where slots run, what overlaps, what waits for the optimizer; and how it fails."""

import threading
import time
from itertools import pairwise

import pytest

from rptrain.engine import transfer, worker
from rptrain.engine.errors import EngineError
from rptrain.engine.stage_pass import StagePass
from rptrain.plan.schedule import Plan

from . import plain, runs

PLAN = Plan.parse("F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4")
CFG = plain.config()


def trained(asynchronous, probe=None, steps=3):
    *_, spans = runs.run(CFG, plain.make_batches(steps), PLAN, asynchronous=asynchronous, probe=probe, trace=True)
    return spans


def on(spans, iteration, index):
    """Start of the first and end of the last micro-batch of a slot."""
    own = [s for s in spans if s.iteration == iteration and s.slot.index == index]
    return min(s.start() for s in own), max(s.end() for s in own)


def test_every_slot_runs_where_the_plan_says_and_micro_batches_run_in_order():
    spans = trained(asynchronous=True)
    for iteration in range(3):
        for slot in PLAN.slots(iteration):
            own = [s for s in spans if s.iteration == iteration and s.slot == slot]
            assert [s.micro_batch for s in own] == list(slot.micro_batches)
            assert all(a.end() <= b.start() for a, b in pairwise(own))
    assert len(spans) == 3 * 5 * 4


def test_the_compute_of_two_workers_overlaps():
    def slow(where):
        if " micro-batch " in where and where[-1].isdigit():
            time.sleep(0.01)

    spans = trained(asynchronous=True, probe=slow)
    lanes = [[s for s in spans if s.slot.device == d] for d in (0, 1)]
    both = sum(max(0.0, min(a.end(), b.end()) - max(a.start(), b.start())) for a in lanes[0] for b in lanes[1])
    busy = sum(s.end() - s.start() for s in lanes[0])
    assert both > 0.3 * busy
    for iteration in range(3):  # a stage starts before the one before it has ended: micro-batches stream through
        assert on(spans, iteration, 1)[0] < on(spans, iteration, 0)[1]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_slow_optimizer_delays_the_next_forward_in_sync_only(asynchronous):
    updates = {}

    def slow(where):
        if where.startswith("optimizer"):
            updates.setdefault(where, []).append(time.perf_counter())
            time.sleep(0.05)

    spans = trained(asynchronous, slow)
    last_update = max(times[0] for times in updates.values())
    first_update = updates["optimizer update of layers.0"][0]
    next_forward = on(spans, 1, 0)[0]
    if asynchronous:
        assert next_forward < min(times[0] for times in updates.values()) + 0.05
    else:
        assert next_forward > first_update
        assert next_forward < last_update, "no barrier: the first layers are used before the last are updated"


def test_a_stage_computes_its_first_layer_before_its_last_is_updated():
    """The second step's, which alone is on device 1: the first update of its last layer waits for it."""
    first = next(iter(PLAN.slots(1)))
    assert first.stage.stop == 2 and [next(iter(PLAN.slots(step))).device for step in range(3)] == [0, 1, 0]
    computed = threading.Event()

    def probe(where):
        if where == "optimizer update of layers.1":
            assert computed.wait(30), "the stage waits for all its layers"
        if ":F0-1@1" in where and where.endswith("micro-batch 0"):
            computed.set()

    spans = trained(asynchronous=False, probe=probe)
    assert computed.is_set() and len(spans) == 3 * 5 * 4


@pytest.mark.parametrize(
    "place",
    [
        "upload",
        "micro-batch 2",
        "micro-batch 1 input",
        "micro-batch 3 output",
        "rounding",
        "optimizer",
        "embedding m3",
        "gradient rows m2",
    ],
)
def test_a_failure_anywhere_surfaces_with_its_place_and_ends_every_thread(place):
    before = threading.active_count()
    seen = []

    def fail(where):
        if place in where:
            seen.append(where)
            if len(seen) == 3:
                raise OSError("planted")

    with pytest.raises(EngineError, match="planted") as caught:
        runs.run(CFG, plain.make_batches(6), PLAN, asynchronous=True, probe=fail)
    assert isinstance(caught.value.__cause__, OSError)
    assert place.split()[0] in str(caught.value)
    assert threading.active_count() == before


def test_gradient_rows_that_fail_end_every_wait():
    """The other rounds wait for boundary 0, whose gradients nobody takes any more."""

    def fail(where):
        if where == "gradient rows m0":
            raise OSError("planted")

    plan = Plan.parse("F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=1")
    with pytest.raises(EngineError, match="planted"):
        runs.run(CFG, plain.make_batches(3), plan, asynchronous=False, probe=fail)


def test_an_error_of_the_caller_ends_the_engine_at_once():
    before = threading.active_count()
    batches = plain.make_batches(3)
    with pytest.raises(ValueError, match="the plan is for"):
        runs.run(CFG, [batches[0], *plain.make_batches(1, micro_batches=2)], PLAN, asynchronous=True)
    assert threading.active_count() == before


def test_a_failure_while_the_caller_waits_for_a_loss_is_told_in_full():
    def fail(where):
        if "FB4-4" in where and where.endswith("micro-batch 2"):
            time.sleep(0.1)
            raise OSError("planted")

    with pytest.raises(EngineError, match="planted"):
        runs.run(CFG, plain.make_batches(2), PLAN, asynchronous=True, lagged=False, probe=fail)


def test_a_worker_is_at_most_two_micro_batches_ahead(monkeypatch):
    """Of a device that computes slowly."""
    counts = {"issued": 0, "done": 0}
    ahead = []

    class Counted(StagePass):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            counts["issued"] += 1
            ahead.append(counts["issued"] - counts["done"])

        def step(self, i, scale, loss):
            super().step(i, scale, loss)
            if i == len(self._stage.layers) - 1:
                time.sleep(0.01)
                counts["done"] += 1

    monkeypatch.setattr(worker, "StagePass", Counted)
    runs.run(CFG, plain.make_batches(2), "F0-3 FB4-4 B0-3 | N=1 M=4 MR=4", asynchronous=True)
    assert len(ahead) == 2 * 3 * 4 and max(ahead) == worker.AHEAD


@pytest.mark.parametrize("drained", [1, 30_000, 1 << 30])
def test_gradients_drain_in_the_first_windows_of_the_next_slot(drained, monkeypatch):
    found = []
    made = transfer.Download.__init__

    def noted(download, *arguments):
        made(download, *arguments)
        found.append((len(download._windows), arguments[-1].nbytes))

    monkeypatch.setattr(transfer, "DRAINED", drained)
    monkeypatch.setattr(transfer.Download, "__init__", noted)
    runs.run(CFG, plain.make_batches(2), "F0-3 FB4-4 B0-3 | N=1 M=4 MR=4", asynchronous=True)
    assert [count for count, _ in found] == [min(4, -(-nbytes // drained)) for _, nbytes in found]
    assert len(found) == 4
