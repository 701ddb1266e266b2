"""The engine's main tests: exactly the plain loop, whatever the devices, the plan, or the timing."""

import random
import threading
import time

import pytest
import torch

from tests.cases import UPDATES, long
from tests.families import FAMILIES

from . import plain, runs

PLANS = [
    "F0-1 F2-3 FB4-4 B2-3 B0-1",
    "F0-2 FB3-4 B2-2 B1-1 B0-0",
    "FB0-4",
]
OTHERS = [kind for kind, cases in FAMILIES.items() if cases.engine]  # families
AUX = plain.GPT_OSS | {"router_aux_loss_coef": 0.7}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("cfg", "steps"),
    [
        (plain.CONFIG, 10),
        (plain.config(tie_word_embeddings=True, pad_token_id=7), 10),
        (plain.QWEN2 | {"pad_token_id": -3}, 3),
        (plain.QWEN3_MOE, 3),
        (plain.QWEN3_MOE | {"decoder_sparse_step": 2}, 3),
        (plain.GPT_OSS, 3),
        (plain.QWEN3_MOE | {"decoder_sparse_step": 2, "router_aux_loss_coef": 0.7}, 3),
        (AUX, 3),
    ],
    ids=["untied", "tied", "qwen2", "qwen3-moe", "qwen3-moe-some-dense", "gpt-oss", "qwen3-moe-aux", "gpt-oss-aux"],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_equals_the_plain_loop(asynchronous, cfg, steps):
    rate = 2e-2 / steps
    batches = plain.make_batches(steps)
    store = runs.make_store(cfg, torch.float64, asynchronous=asynchronous)
    expected = runs.checkpoint_tensors(store)
    before = {name: tensor.clone() for name, tensor in expected.items()}
    options = {"weight_decay": 0.1, "max_grad_norm": 1.0}
    losses, norms = plain.train(
        expected, cfg, batches, [rate] * steps, delayed=asynchronous, betas=runs.BETAS, **options
    )
    assert max(norms) > 1.0, "clipping must take part"
    got_losses, got_norms, got, _ = runs.run(
        cfg, batches, f"{PLANS[0]} | N=2 M=4 MR=4", rate=rate, asynchronous=asynchronous, store=store, **options
    )
    assert got_losses == pytest.approx(losses, abs=1e-10)
    assert got_norms == pytest.approx(norms, rel=1e-9)
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() < 1e-10, name
        assert (got[name] - before[name]).abs().max() > rate, f"{name} must have moved"


def test_scales_rotations_as_yarn_asks():
    """In a context so long that no frequency is stretched."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "original_max_position_embeddings": 10**9}
    cfg = plain.config(rope_parameters=yarn)
    batches = plain.make_batches(3)
    store = runs.make_store(cfg, torch.float64, asynchronous=False)
    expected = runs.checkpoint_tensors(store)
    losses, _ = plain.train(expected, cfg, batches, [1e-3] * 3, delayed=False, betas=runs.BETAS)
    got, _, _, _ = runs.run(cfg, batches, f"{PLANS[0]} | N=2 M=4 MR=4", asynchronous=False, store=store)
    assert got == pytest.approx(losses, abs=1e-10)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("cfg", "steps"),
    [
        (plain.config(tie_word_embeddings=True, pad_token_id=7), 6),
        (AUX, 2),
        *(long(plain.of_family(kind), 2) if FAMILIES[kind].slow else (plain.of_family(kind), 2) for kind in OTHERS),
    ],
    ids=["llama", "gpt-oss-aux", *OTHERS],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_any_number_of_workers_and_any_plan(asynchronous, dtype, cfg, steps):
    batches = plain.make_batches(steps)

    def go(plan):
        losses, norms, weights, _ = runs.run(
            cfg, batches, plan, asynchronous=asynchronous, dtype=dtype, max_grad_norm=1.0
        )
        return losses, norms, weights

    losses, norms, weights = go(f"{PLANS[0]} | N=1 M=4 MR=4")
    others = [f"{PLANS[0]} | N=3 M=4 MR=4", *(f"{stages} | N=2 M=4 MR=4" for stages in PLANS[1:])]
    for other in others:
        got_losses, got_norms, got = go(other)
        assert got_losses == losses, other
        assert got_norms == norms, other
        assert all(torch.equal(got[name], weights[name]) for name in weights), other


@UPDATES
def test_rounds_are_a_constant_of_the_run_that_workers_do_not_change(asynchronous):
    cfg = plain.config(tie_word_embeddings=True)
    batches = plain.make_batches(5, micro_batches=6)
    results = [
        runs.run(cfg, batches, f"{PLANS[0]} | N={n} M=6 MR=2", asynchronous=asynchronous, dtype=torch.bfloat16)
        for n in (1, 2, 3)
    ]
    for losses, norms, weights, _ in results[1:]:
        assert losses == results[0][0]
        assert norms == results[0][1]
        assert all(torch.equal(weights[name], results[0][2][name]) for name in weights)


def test_rounds_add_up_to_the_same_gradient():
    cfg = plain.config(tie_word_embeddings=True)
    batches = plain.make_batches(5)
    one, two = (
        runs.run(cfg, batches, f"{PLANS[0]} | N=2 M=4 MR={size}", asynchronous=True, dtype=torch.float64)
        for size in (4, 2)
    )
    assert one[0] == pytest.approx(two[0], abs=1e-12)
    assert all((one[2][name] - two[2][name]).abs().max() < 1e-12 for name in one[2])


@UPDATES
def test_delays_anywhere_change_nothing(asynchronous):
    cfg = plain.config()
    batches = plain.make_batches(5)
    plan = f"{PLANS[0]} | N=3 M=4 MR=4"
    reference = runs.run(cfg, batches, plan, asynchronous=asynchronous)
    for seed in range(3):
        rng, lock, places = random.Random(seed), threading.Lock(), set()

        def probe(where, rng=rng, lock=lock, places=places):
            with lock:
                places.add(where.split()[0] if "optimizer" in where else where.split()[-1])
                pause = rng.random() < 0.15 and rng.random() * 0.01
            if pause:
                time.sleep(pause)

        losses, norms, weights, _ = runs.run(cfg, batches, plan, asynchronous=asynchronous, probe=probe)
        assert {"optimizer", "upload", "download", "input", "output", "3"} <= places
        assert (losses, norms) == reference[:2]
        assert all(torch.equal(weights[name], reference[2][name]) for name in weights)


def test_waiting_for_each_loss_changes_nothing():
    cfg = plain.config()
    batches = plain.make_batches(5)
    plan = f"{PLANS[0]} | N=2 M=4 MR=4"

    def slow(where):
        if where.endswith("losses"):
            time.sleep(0.02)

    ahead = runs.run(cfg, batches, plan, asynchronous=True)
    behind = runs.run(cfg, batches, plan, asynchronous=True, lagged=False, probe=slow)
    assert ahead[:2] == behind[:2]
    assert all(torch.equal(ahead[2][name], behind[2][name]) for name in ahead[2])


@pytest.mark.parametrize("workers", [1, 2])
def test_an_optimizer_slower_than_the_devices_changes_nothing(workers):
    """Gradients of the next iteration must not overwrite those that the optimizer still needs."""
    cfg = plain.config()
    batches = plain.make_batches(4)
    plan = f"{PLANS[0]} | N={workers} M=4 MR=4"

    def slow(where):
        if where.startswith("optimizer"):
            time.sleep(0.03)

    reference, slowed = (runs.run(cfg, batches, plan, asynchronous=True, probe=probe) for probe in (None, slow))
    assert slowed[:2] == reference[:2]
    assert all(torch.equal(slowed[2][name], reference[2][name]) for name in slowed[2])


@pytest.mark.parametrize("plan", PLANS)
def test_uploads_slower_than_the_devices_change_nothing(plan):
    """No stage may compute with parameters that are still on their way."""
    cfg = plain.config()
    batches = plain.make_batches(4)

    def slow(where):
        if where.endswith(" upload") and "batch" not in where:
            time.sleep(0.02)

    plan = f"{plan} | N=2 M=4 MR=4"
    reference, slowed = (runs.run(cfg, batches, plan, asynchronous=True, probe=probe) for probe in (None, slow))
    assert slowed[:2] == reference[:2]
    assert all(torch.equal(slowed[2][name], reference[2][name]) for name in slowed[2])


def test_losses_are_sent_before_the_next_iteration_overwrites_them():
    cfg = plain.config()
    batches = plain.make_batches(4)

    def slow(where):
        if where.endswith("losses"):
            time.sleep(0.2)

    quick, slowed = (
        runs.run(cfg, batches, f"{PLANS[2]} | N=1 M=4 MR=4", asynchronous=True, probe=probe) for probe in (None, slow)
    )
    assert slowed[0] == quick[0]
