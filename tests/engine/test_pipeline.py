"""It is a pipeline, not a loop: where slots run, what overlaps, what waits for the optimizer; and how it fails."""

import threading
import time
from itertools import pairwise

import pytest
import torch

from rptrain.engine import stage_pass, worker
from rptrain.engine.errors import EngineError
from rptrain.engine.recorder import DeviceRecorder
from rptrain.engine.stage_pass import StagePass
from rptrain.engine.transfer import copies
from rptrain.schedule.plan import Plan

from .. import run_tools as tools
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
    """Micro-batches stream through: one after the first waits until the next stage, elsewhere, has the one before."""
    begun, waits = {}, {}
    for iteration in range(2):  # on either device; those of the third have the names of the first
        slots = PLAN.slots(iteration)
        for slot, following in ((slots[0], slots[1]), (slots[2], slots[3])):
            assert slot.device != following.device
            for i in range(1, 4):
                waits[f"{slot} micro-batch {i}"] = f"{following} micro-batch {i - 1}"
                begun[f"{following} micro-batch {i - 1}"] = threading.Event()

    def probe(where):
        if where in begun:
            begun[where].set()
        if where in waits:
            assert begun[waits[where]].wait(tools.PATIENCE), f"no {waits[where]} during {where}"

    spans = trained(asynchronous=True, probe=probe, steps=2)
    assert len(begun) == 2 * 2 * 3 and all(event.is_set() for event in begun.values())
    for iteration in range(2):
        for index in (0, 2):
            assert on(spans, iteration, index + 1)[0] < on(spans, iteration, index)[1]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_next_forward_waits_for_the_first_layers_updates_in_sync_only(asynchronous):
    """The first step's updates wait for it: in async all of them, in sync those behind the layers that it uses."""
    forward, updates = threading.Event(), []

    def probe(where):
        if where == f"{PLAN.slots(1)[0]} micro-batch 0":
            forward.set()
        if where.startswith("optimizer update") and where not in updates:
            updates.append(where)
            if asynchronous or where == "optimizer update of layers.2":
                assert forward.wait(tools.PATIENCE), "the next forward waits for all updates"
            elif where == "optimizer update of layers.0":
                assert not forward.wait(0.05), "the next forward does not wait for what it uses"

    trained(asynchronous, probe)
    assert forward.is_set() and "optimizer update of layers.2" in updates


def test_a_stage_computes_its_first_layer_before_its_last_is_updated():
    """The second step's, which alone is on device 1: the first update of its last layer waits for it."""
    first = next(iter(PLAN.slots(1)))
    assert first.stage.stop == 2 and [next(iter(PLAN.slots(step))).device for step in range(3)] == [0, 1, 0]
    computed = threading.Event()

    def probe(where):
        if where == "optimizer update of layers.1":
            assert computed.wait(tools.PATIENCE), "the stage waits for all its layers"
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
        "download",
        "optimizer",
        "embedding m3",
        "gradient rows m2",
    ],
)
def test_a_failure_anywhere_surfaces_with_its_place_and_ends_every_thread(place):
    before = {*threading.enumerate()}
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
    assert {*threading.enumerate()} <= before


def test_an_exception_whose_text_raises_ends_every_thread():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    before = {*threading.enumerate()}

    def fail(where):
        if "FB4-4" in where and where.endswith("micro-batch 2"):
            raise Mute

    with pytest.raises(EngineError, match=r"FB4-4.*: Mute \(its message cannot be shown: __str__ raised RuntimeError"):
        runs.run(CFG, plain.make_batches(3), PLAN, asynchronous=True, probe=fail)
    assert {*threading.enumerate()} <= before


def test_gradient_rows_that_fail_end_every_wait():
    """The other rounds wait for boundary 0, whose gradients nobody takes any more."""

    def fail(where):
        if where == "gradient rows m0":
            raise OSError("planted")

    plan = Plan.parse("F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=1")
    with pytest.raises(EngineError, match="planted"):
        runs.run(CFG, plain.make_batches(3), plan, asynchronous=False, probe=fail)


def test_an_error_of_the_caller_ends_the_engine_at_once():
    before = {*threading.enumerate()}
    batches = plain.make_batches(3)
    with pytest.raises(ValueError, match="the plan is for"):
        runs.run(CFG, [batches[0], *plain.make_batches(1, micro_batches=5)], PLAN, asynchronous=True)
    assert {*threading.enumerate()} <= before


def test_a_failure_while_the_caller_waits_for_a_loss_is_told_in_full():
    def fail(where):
        if "FB4-4" in where and where.endswith("micro-batch 2"):
            time.sleep(0.1)
            raise OSError("planted")

    with pytest.raises(EngineError, match="planted"):
        runs.run(CFG, plain.make_batches(2), PLAN, asynchronous=True, lagged=False, probe=fail)


def test_a_worker_is_at_most_two_micro_batches_ahead(monkeypatch):
    """The device computes slowly, and ends the first micro-batch only after the second was issued."""
    counts = {"issued": 0, "done": 0}
    ahead = []

    class Counted(StagePass):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            counts["issued"] += 1
            ahead.append(counts["issued"] - counts["done"])

        def run(self, steps, scale, loss):
            super().run(steps, scale, loss)
            if steps.stop == self.pieces()[-1].stop:
                tools.wait_for(lambda: len(ahead) > 1)
                time.sleep(0.01)
                counts["done"] += 1

    monkeypatch.setattr(worker, "StagePass", Counted)
    runs.run(CFG, plain.make_batches(2), "F0-3 FB4-4 B0-3 | N=1 M=4 MR=4", asynchronous=True)
    assert len(ahead) == 2 * 3 * 4 and max(ahead) == worker.MICRO_BATCHES_AHEAD


def test_of_a_long_pass_a_worker_issues_a_few_pieces_ahead(monkeypatch):
    """The device computes slowly, and ends the first piece only after others were issued."""
    counts = {"issued": 0, "done": 0}
    ahead = []

    computing, run = DeviceRecorder.computing, StagePass.run

    def issue(recorder, *arguments):
        counts["issued"] += 1
        ahead.append(counts["issued"] - counts["done"])
        return computing(recorder, *arguments)

    def compute(work, *arguments):
        run(work, *arguments)
        tools.wait_for(lambda: len(ahead) >= worker.PIECES_AHEAD)
        time.sleep(0.002)
        counts["done"] += 1

    monkeypatch.setattr(DeviceRecorder, "computing", issue)
    monkeypatch.setattr(StagePass, "run", compute)
    monkeypatch.setattr(stage_pass, "PIECE_STEPS", 1)
    runs.run(CFG, plain.make_batches(2), "FB0-4 | N=1 M=4 MR=4", asynchronous=True)
    assert len(ahead) == 2 * 4 * 9 and max(ahead) == worker.PIECES_AHEAD


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pieces_of_any_length_give_the_same_bits(asynchronous, monkeypatch):
    plan = "F0-1 FB2-4 B0-1 | N=2 M=4 MR=2"
    whole = runs.run(CFG, plain.make_batches(3), plan, asynchronous=asynchronous)
    monkeypatch.setattr(stage_pass, "PIECE_STEPS", 1)
    pieces = runs.run(CFG, plain.make_batches(3), plan, asynchronous=asynchronous)
    assert pieces[:2] == whole[:2] and all(torch.equal(pieces[2][name], value) for name, value in whole[2].items())


@pytest.mark.parametrize("before", ["F1-1", "FB2-4", "B1-1"])
def test_sums_of_earlier_rounds_arrive_while_the_stage_before_is_computed(before):
    plan = Plan.parse("F0-0 F1-1 FB2-4 B1-1 B0-0 | N=1 M=4 MR=2")
    stages = [str(stage) for stage in plan.stages]
    after, arriving, waited = stages[stages.index(before) + 1], threading.Event(), []

    def hold(where):
        if f":{after}@0r1" in where and where.endswith("partial sums"):
            arriving.set()
        if f":{before}@0r1" in where and where.endswith("micro-batch 3") and not waited:
            waited.append(arriving.wait(10))

    runs.run(CFG, plain.make_batches(1), plan, asynchronous=False, probe=hold)
    assert waited == [True]


@pytest.mark.parametrize("drained", [1, 30_000, 1 << 30])
def test_gradients_drain_in_the_first_windows_of_the_next_slot(drained, monkeypatch):
    found = []
    made = copies.Download.__init__

    def noted(download, *arguments):
        made(download, *arguments)
        found.append((len(download._windows), arguments[-2].nbytes))

    monkeypatch.setattr(copies, "DRAINED", drained)
    monkeypatch.setattr(copies.Download, "__init__", noted)
    runs.run(CFG, plain.make_batches(2), "F0-3 FB4-4 B0-3 | N=1 M=4 MR=4", asynchronous=True)
    assert [count for count, _ in found] == [min(4, -(-nbytes // drained)) for _, nbytes in found]
    assert len(found) == 4
