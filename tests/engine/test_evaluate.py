"""The loss of other data, forward only: the plain model's, on any number of devices; training is as without."""

import threading
import time

import pytest
import torch

from rptrain.engine.errors import EngineError
from rptrain.models.transforms.lora import LoRA

from . import plain, runs

CFG = plain.config(tie_word_embeddings=True)
STAGES = "F0-1 F2-3 FB4-4 B2-3 B0-1"


def trained(batches, other, plan, *, asynchronous, dtype=torch.float64, lora=None, **options):
    """The losses of `other` before each step and after the last, and the weights."""
    plain_plan = f"{STAGES} | {plan}"
    wide = {"wide_grad": "MR=2" in plan, "lora": lora}
    with runs.make_store(CFG, dtype, asynchronous=asynchronous, **wide) as store:
        tokens = batches[0].sequences * batches[0].length
        with runs.engine_of(store, plain_plan, tokens=tokens, asynchronous=asynchronous, **options) as engine:
            found = []
            for batch in batches:
                found.append((engine.evaluate(other), runs.checkpoint_tensors(store)))
                engine.forward_backward(batch)
                engine.step(1e-2)
            found += [(engine.evaluate(other), runs.checkpoint_tensors(store)) for _ in range(2)]
        return found, runs.checkpoint_tensors(store)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_it_is_the_loss_of_the_newest_weights_and_changes_nothing(asynchronous):
    *batches, other = plain.make_batches(4)
    found, weights = trained(batches, other, "N=2 M=4 MR=4", asynchronous=asynchronous)
    for loss, at in found:
        assert loss == pytest.approx(plain.loss(at, CFG, other).item() * other.supervised, rel=1e-10)
    assert len({loss for loss, _ in found}) == 4 and found[-1][0] == found[-2][0]
    plan = f"{STAGES} | N=2 M=4 MR=4"
    expected = runs.run(CFG, batches, plan, dtype=torch.float64, asynchronous=asynchronous, rate=1e-2)[2]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("plan", ["N=1 M=4 MR=4", "N=3 M=4 MR=4", "N=2 M=4 MR=2"])
def test_the_number_of_devices_and_rounds_changes_no_bit_of_it(plan):
    *batches, other = plain.make_batches(2)
    usual = trained(batches, other, "N=2 M=4 MR=4", asynchronous=True, dtype=torch.float32)[0]
    found = trained(batches, other, plan, asynchronous=True, dtype=torch.float32)[0]
    assert found[0][0] == usual[0][0]
    assert "MR=2" in plan or found[-1][0] == usual[-1][0]


def test_a_slow_device_keeps_its_activations():
    """With more devices than a round's micro-batches, one without any is at the next round before the others."""

    def probe(where):
        if "evaluation" in where and threading.current_thread().name.startswith("cpu:0 "):
            time.sleep(0.005)

    *batches, other = plain.make_batches(2)
    usual, slow = (
        trained(batches, other, "N=3 M=4 MR=2", asynchronous=True, dtype=torch.float32, probe=p)[0][0][0]
        for p in (None, probe)
    )
    assert slow == usual == trained(batches, other, "N=1 M=4 MR=2", asynchronous=True, dtype=torch.float32)[0][0][0]


def test_nothing_is_dropped():
    *batches, other = plain.make_batches(2)
    with_dropout = trained(
        batches, other, "N=2 M=4 MR=4", asynchronous=True, lora=LoRA(r=2, lora_alpha=4, lora_dropout=0.5)
    )[0]
    without = trained(batches, other, "N=2 M=4 MR=4", asynchronous=True, lora=LoRA(r=2, lora_alpha=4))[0]
    assert with_dropout[0][0] == without[0][0] and with_dropout[-1][0] != without[-1][0]


@pytest.mark.parametrize("plan", ["N=1 M=4 MR=4", "N=2 M=4 MR=2"])
def test_of_a_quantized_base_it_is_what_a_training_pass_says(plan):
    """Before a step, in sync, both are of the same weights."""
    batches, lora = plain.make_batches(3), LoRA(r=2, lora_alpha=4)
    kind = {"wide_grad": "MR=2" in plan, "asynchronous": False, "lora": lora, "base": "nf4"}
    with runs.make_store(CFG, torch.float64, **kind) as store:
        tokens = batches[0].sequences * batches[0].length
        with runs.engine_of(store, f"{STAGES} | {plan}", tokens=tokens, asynchronous=False) as engine:
            for batch in batches:
                loss = engine.evaluate(batch) / batch.supervised
                at = runs.checkpoint_tensors(store)
                assert loss == pytest.approx(engine.forward_backward(batch).result(), rel=1e-12)
                assert loss == pytest.approx(plain.loss(at, CFG | {"lora_scale": lora.scale}, batch).item(), rel=1e-10)
                engine.step(1e-2)


def test_a_failure_is_raised():
    def probe(where):
        if "evaluation, layer 2" in where:
            raise OSError("planted")

    *batches, other = plain.make_batches(2)
    with pytest.raises(EngineError, match="planted"):
        trained(batches, other, "N=2 M=4 MR=4", asynchronous=True, probe=probe)


def test_it_is_for_between_steps_and_for_batches_of_a_step() -> None:
    batches = plain.make_batches(1)
    with runs.make_store(plain.CONFIG, torch.float32, asynchronous=True) as store:
        tokens = batches[0].sequences * batches[0].length
        with runs.engine_of(store, "F0-2 FB3-4 B0-2 | N=2 M=4 MR=4", tokens=tokens) as engine:
            engine.forward_backward(batches[0])
            with pytest.raises(RuntimeError, match="call step"):
                engine.evaluate(batches[0])
            engine.step(1e-3)
            with pytest.raises(ValueError, match="the plan is for"):
                engine.evaluate(plain.make_batches(1, micro_batches=5)[0])
            assert engine.evaluate(batches[0]) > 0
