"""The state after a step can be read while training goes on: no unit changes before it was released."""

import threading

import pytest
import torch

from rptrain.checkpoint.state import Background, load_state, save_state
from rptrain.engine.errors import EngineError
from rptrain.utils.errors import UserError

from .. import run_tools as tools
from . import plain, runs

CFG = plain.config(tie_word_embeddings=True)
PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"


def go_on(engine, batches):
    for batch in batches:
        engine.forward_backward(batch)
        engine.step(1e-3)


def saved_slowly(engine, store, folder, failure):
    """Each unit is saved once the optimizer waits for it."""
    snapshot = engine.snapshot()

    def proceed():
        tools.wait_for(lambda: engine.waiting().get("optimizer", "").startswith("waits for saved "))

    def save():
        try:
            with snapshot:
                save_state(
                    folder,
                    store.units,
                    step=3,
                    meta={"model_dir": str(folder)},
                    background=Background(snapshot.order, snapshot.release, proceed),
                )
        except (OSError, UserError, AssertionError) as error:
            failure.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    return thread, snapshot


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind",
    [(False, torch.float32, False), (True, torch.float32, False), *((True, torch.bfloat16, x) for x in (False, True))],
)
def test_what_is_saved_beside_training_is_the_state_of_its_step(kind, tmp_path, monkeypatch):
    """And training comes to the same weights as without, from there on and after a resume."""
    monkeypatch.setattr("rptrain.checkpoint.state.THREADS", 1)  # a unit at a time
    asynchronous, dtype, fp8 = kind
    batches = plain.make_batches(6)
    expected = runs.run(CFG, batches, PLAN, asynchronous=asynchronous, dtype=dtype, fp8=fp8)[2]
    (tmp_path / "config.json").write_text("{}")
    failure = []
    with runs.make_store(CFG, dtype, asynchronous=asynchronous, fp8=fp8) as store:
        tokens = batches[0].sequences * batches[0].length
        with runs.engine_of(store, PLAN, tokens=tokens, asynchronous=asynchronous) as engine:
            go_on(engine, batches[:3])
            thread, snapshot = saved_slowly(engine, store, tmp_path, failure)
            go_on(engine, batches[3:])
            engine.synchronize()
        thread.join()
        assert not failure and snapshot.waited > 0
        there = runs.checkpoint_tensors(store)
        assert all(torch.equal(there[name], expected[name]) for name in expected)
    with runs.make_store(CFG, dtype, asynchronous=asynchronous, seed=9, fp8=fp8) as store:
        load_state(tmp_path / "checkpoint-3", store.units)
        again = runs.run(CFG, batches[3:], PLAN, asynchronous=asynchronous, store=store, applied=3)[2]
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_a_save_that_fails_releases_every_unit(tmp_path):
    batches = plain.make_batches(4)
    failure = []
    with runs.make_store(CFG, torch.float32, asynchronous=True) as store:
        tokens = batches[0].sequences * batches[0].length
        with runs.engine_of(store, PLAN, tokens=tokens, asynchronous=True) as engine:
            go_on(engine, batches[:2])
            (tmp_path / "config.json").write_text("{}")
            (tmp_path / ".checkpoint-3.rptrain-partial").write_text("in the way")
            thread, _ = saved_slowly(engine, store, tmp_path, failure)
            go_on(engine, batches[2:])
            engine.synchronize()
        thread.join()
    assert isinstance(failure[0], UserError) and "is in the way" in str(failure[0])


def test_two_snapshots_at_once_are_refused():
    """The first would be written over: updates wait for the last one only."""
    batches = plain.make_batches(1)
    with runs.make_store(CFG, torch.float32, asynchronous=False) as store:
        tokens = batches[0].sequences * batches[0].length
        with runs.engine_of(store, PLAN, tokens=tokens, asynchronous=False) as engine:
            go_on(engine, batches)
            with engine.snapshot() as first:
                first.release(0)
                with pytest.raises(AssertionError, match="one snapshot at a time"):
                    engine.snapshot()
            with engine.snapshot():
                pass


def test_a_failure_ends_the_wait_for_a_unit():
    def probe(where):
        if "FB4-4" in where and where.endswith("micro-batch 2") and armed.is_set():
            raise OSError("planted")

    armed = threading.Event()
    batches = plain.make_batches(4)
    with runs.make_store(CFG, torch.float32, asynchronous=True) as store:
        tokens = batches[0].sequences * batches[0].length
        with (
            pytest.raises(EngineError, match="planted"),
            runs.engine_of(store, PLAN, tokens=tokens, asynchronous=True, probe=probe) as engine,
        ):
            go_on(engine, batches[:1])
            engine.snapshot()
            go_on(engine, batches[1:2])
            tools.wait_for(lambda: any("saved" in what for what in engine.waiting().values()))
            assert engine.waiting()["optimizer"].startswith("waits for saved ")
            armed.set()
            go_on(engine, batches[2:])
            engine.synchronize()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_units_are_written_in_the_order_of_their_updates(asynchronous, tmp_path, monkeypatch):
    """Else the first update would wait for all of the save."""
    monkeypatch.setattr("rptrain.checkpoint.state.THREADS", 1)
    (tmp_path / "config.json").write_text("{}")
    batches = plain.make_batches(1)
    with runs.make_store(CFG, torch.float32, asynchronous=asynchronous) as store:
        tokens = batches[0].sequences * batches[0].length
        with runs.engine_of(store, PLAN, tokens=tokens, asynchronous=asynchronous) as engine:
            go_on(engine, batches)
            snapshot, released = engine.snapshot(), []
            with snapshot:
                save_state(
                    tmp_path,
                    store.units,
                    step=1,
                    meta={"model_dir": str(tmp_path)},
                    background=Background(snapshot.order, released.append),
                )
    head, embedding = len(store.spec.units) - 1, 0
    assert released == list(snapshot.order) and sorted(released) == list(range(len(store.spec.units)))
    assert released.index(head) < released.index(1) if asynchronous else released[0] == embedding
