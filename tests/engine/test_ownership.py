"""The engine gives back what it took: when a part of it cannot be made, when a device fails, when a step fails last."""

import threading
import time
import weakref

import pytest
import torch

from rptrain.engine import engine as module
from rptrain.engine.devices.cpu import CpuDevice
from rptrain.engine.engine import Devices, Engine
from rptrain.engine.errors import EngineError
from rptrain.engine.footprint import footprint
from rptrain.engine.memory import boundary
from rptrain.engine.memory.arena import Arena
from rptrain.engine.meter import Meter
from rptrain.engine.optimizer import Optimizer
from rptrain.schedule.plan import Plan

from . import plain, runs

CFG = plain.config()
PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"


@pytest.fixture
def nothing_left():
    threads, count = {*threading.enumerate()}, torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert {*threading.enumerate()} <= threads
    assert torch.get_num_threads() == 2
    torch.set_num_threads(count)


@pytest.fixture
def close_fails(monkeypatch):
    close = CpuDevice.close

    def fails(device):
        close(device)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(CpuDevice, "close", fails)


def test_a_worker_that_cannot_be_made(monkeypatch, nothing_left):
    made, worker = [], module.Worker

    def second_fails(*arguments):
        if made:
            raise MemoryError("no room")
        made.append(worker(*arguments))
        return made[0]

    monkeypatch.setattr(module, "Worker", second_fails)
    with pytest.raises(MemoryError, match="no room"):
        runs.run(CFG, plain.make_batches(1), PLAN, asynchronous=True)


def test_a_device_that_cannot_be_closed(close_fails, nothing_left):
    with pytest.raises(RuntimeError, match="the device is gone"):
        runs.run(CFG, plain.make_batches(1), PLAN, asynchronous=True)


def test_what_failed_first_is_told_where_closing_fails_too(close_fails, nothing_left):
    def probe(where):
        if "FB4-4" in where and where.endswith("micro-batch 2"):
            raise OSError("planted")

    with pytest.raises(EngineError, match="planted"):
        runs.run(CFG, plain.make_batches(3), PLAN, asynchronous=True, probe=probe)


def test_a_failure_after_the_last_call_is_raised_on_leaving(nothing_left):
    def probe(where):
        if where.startswith("optimizer"):
            time.sleep(0.1)
            raise OSError("planted")

    with (
        runs.make_store(CFG, torch.float32, asynchronous=True) as store,
        pytest.raises(EngineError, match="planted"),
        runs.engine_of(store, PLAN, tokens=32, probe=probe) as engine,
    ):
        engine.forward_backward(plain.make_batches(1)[0])
        engine.step(1e-3)


def test_losses_that_are_read_late(nothing_left):
    batches = plain.make_batches(8)

    def late(where):
        if where.endswith("losses") and where.startswith("0:") and "@0" in where:
            time.sleep(0.3)

    quick, slow = (
        runs.run(CFG, batches, "FB0-4 | N=4 M=4 MR=4", asynchronous=True, probe=probe)[0] for probe in (None, late)
    )
    assert quick == slow


def test_a_closed_engine_that_somebody_still_holds_has_no_memory(monkeypatch, nothing_left):
    """Another one may be opened meanwhile, with the same limits."""
    taken, maps = [], []
    empty = CpuDevice.empty

    def watched_empty(device, numel, dtype):
        tensor = empty(device, numel, dtype)
        taken.append(weakref.ref(tensor))
        return tensor

    class WatchedArena(Arena):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            maps.append(weakref.ref(self._map))

    monkeypatch.setattr(CpuDevice, "empty", watched_empty)
    monkeypatch.setattr(boundary, "Arena", WatchedArena)
    with runs.make_store(CFG, torch.float32, asynchronous=True) as store:
        with runs.engine_of(store, PLAN, tokens=32, meter=Meter(), trace=True) as engine:
            for batch in plain.make_batches(3):
                engine.forward_backward(batch)
                engine.step(1e-3)
            engine.synchronize()
            slots = sum(tensor is not None for tensor in (of() for of in taken))
            assert slots >= 2 * (2 + 1 + 1), "of each device: parameters twice, sums, gradients"
            assert [of() is None for of in maps] == [False]
        assert not any(of() is not None for of in taken)
        assert [of() is None for of in maps] == [True]
        assert engine.applied == 3


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_store_can_be_trained_by_one_engine_after_another(tied, nothing_left):
    cfg = plain.config(tie_word_embeddings=tied)
    batches = plain.make_batches(4)
    whole = runs.run(cfg, batches, PLAN, asynchronous=True)
    with runs.make_store(cfg, torch.float32, asynchronous=True) as store:
        runs.run(cfg, batches[:2], PLAN, asynchronous=True, store=store)
        *_, got, _ = runs.run(cfg, batches[2:], PLAN, asynchronous=True, store=store, applied=2)
    assert all(torch.equal(got[name], whole[2][name]) for name in got)


def test_a_store_of_the_other_kind_is_refused(nothing_left):
    """One for steps of other micro-batches."""
    with runs.make_store(CFG, torch.float32, asynchronous=False) as store, pytest.raises(AssertionError):
        plan = Plan.parse(PLAN)
        devices = Devices(["cpu:0", "cpu:1"], footprint(store.spec, plan.stages, store.layout, plan.width))
        Engine(store, plan, devices, Optimizer())
