"""Steps in progress that are dropped: the state is that after the last whole step, wherever the engine was."""

import threading

import pytest
import torch

from rptrain.checkpoint.state import Background, load_state, save_state
from rptrain.engine.optim.loss_scale import UNSCALED, LossScale

from .. import run_tools as tools
from . import plain, runs

CFG = plain.config(tie_word_embeddings=True)
PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"
STEPS = 6
SCALE = LossScale(1024.0, 1024.0, 0, 3)
KINDS = {
    "sync": {"asynchronous": False, "dtype": torch.float32},
    "async": {"asynchronous": True, "dtype": torch.float32},
    "float16": {"asynchronous": True, "dtype": torch.float16},
    "fp8": {"asynchronous": True, "dtype": torch.bfloat16, "fp8": True},
}


class Gate:
    """A probe that holds up whoever comes to a place for the given time, until it is opened."""

    def __init__(self, place: str, visit: int) -> None:
        self._place, self._left = place, visit
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, where: str) -> None:
        if where == self._place:
            self._left -= 1
            if self._left == 0:
                self.reached.set()
                assert self.opened.wait(tools.PATIENCE)


def dropped(batches, folder, gate, look, steps, *, asynchronous, dtype, fp8=False, scale):
    """Saves what is left of an engine that was dropped while the gate held it up; returns the snapshot's facts."""
    found = None
    tokens = batches[0].sequences * batches[0].length
    with runs.make_store(CFG, dtype, asynchronous=asynchronous, fp8=fp8) as store:
        engine = runs.engine_of(
            store, PLAN, tokens=tokens, asynchronous=asynchronous, probe=gate, loss_scale=scale, watched=True
        )
        with pytest.raises(KeyboardInterrupt), engine:
            for batch in batches[: steps + 1]:
                engine.forward_backward(batch)
                engine.step(1e-3)
            assert gate.reached.wait(tools.PATIENCE)
            applied = look(engine, gate, steps)
            engine.drop()
            with engine.snapshot() as snapshot:
                save_state(
                    folder,
                    store.units,
                    step=applied,
                    meta={"model_dir": str(folder)},
                    background=Background(snapshot.order),
                )
            found = applied, snapshot.applied, snapshot.loss_scale
            gate.opened.set()
            raise KeyboardInterrupt
    assert found is not None
    return found


def hold(engine, gate, steps):
    assert steps == 0 or engine.ended(steps - 1, tools.PATIENCE)
    return engine.hold()


def hold_before_update(engine, gate, steps):
    """An update that could begin from now on does not."""
    applied = hold(engine, gate, steps)
    gate.opened.set()
    tools.wait_for(lambda: not engine._optimizer._thread.is_alive() or engine.ended(steps, 0.0))
    return applied


def hold_in_update(engine, gate, steps):
    """An update that has begun ends first."""
    found = []
    thread = threading.Thread(target=lambda: found.append(engine.hold()), name="holds")
    thread.start()
    tools.wait_for(lambda: "holds" in engine.waiting())
    gate.opened.set()
    thread.join()
    return found[0]


@pytest.mark.sample(3, gate=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("place", "visit", "look", "steps"),
    [
        ("embedding m2", 4, hold, 3),
        ("gradient rows m0", 3, hold, 2),
        ("optimizer update of layers.1", 3, hold_in_update, 3),
        ("gradient rows m3", 3, hold_before_update, 2),
        ("embedding m0", 1, hold, 0),
    ],
    ids=["forward", "backward", "update", "before-update", "first"],
)
def test_a_dropped_step_leaves_the_state_before_it(place, visit, look, steps, kind, tmp_path):
    """And the steps that follow from there have the bits of an undisturbed run."""
    batches, options = plain.make_batches(STEPS), KINDS[kind]
    scale = SCALE if options["dtype"] == torch.float16 else UNSCALED
    (tmp_path / "config.json").write_text("{}")
    expected = runs.run(CFG, batches, PLAN, loss_scale=scale, **options)
    found, applied, after = dropped(batches, tmp_path, Gate(place, visit), look, steps, scale=scale, **options)
    assert found == applied == steps
    with runs.make_store(CFG, options["dtype"], asynchronous=options["asynchronous"], fp8="fp8" in options) as store:
        load_state(tmp_path / f"checkpoint-{steps}", store.units)
        rest = runs.run(CFG, batches[steps:], PLAN, store=store, applied=applied, loss_scale=after, **options)
    assert rest[0] == expected[0][steps:]
    assert all(torch.equal(rest[2][name], expected[2][name]) for name in expected[2])


def test_the_progress_of_a_step_counts_its_own_micro_batches():
    gate = Gate("embedding m2", 2)
    batches = plain.make_batches(2)
    with (
        runs.make_store(CFG, torch.float32, asynchronous=False) as store,
        runs.engine_of(store, PLAN, tokens=32, asynchronous=False, probe=gate, watched=True) as engine,
    ):
        for batch in batches:
            engine.forward_backward(batch)
            engine.step(1e-3)
        assert gate.reached.wait(tools.PATIENCE)
        assert engine.ended(0, tools.PATIENCE) and not engine.ended(1, 0.0)
        tools.wait_for(lambda: engine.progress(1).computed > 0)
        first, second = engine.progress(0), engine.progress(1)
        gate.opened.set()
        engine.synchronize()
        last = engine.progress(1)
    assert (first.micro_batches, first.done, first.computed, first.updated) == (4, 4, 1.0, 1.0)
    assert second.micro_batches == 4 and 0 < second.computed < 0.5 and second.updated == 0.0
    assert second.left is not None and second.left > 0 and 0 < second.share < 1
    assert (last.done, last.updated, last.left) == (4, 1.0, 0.0)
