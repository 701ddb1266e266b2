"""A step whose gradients are not finite is skipped: weights, moments and the count of steps stay as they were."""

import math

import pytest
import torch

from rptrain.checkpoint.state import load_state, save_state
from rptrain.engine.optim.adam import CpuAdam
from tests.cases import UPDATES

from . import plain, runs

CFG = plain.config(tie_word_embeddings=True)
PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"


def spoil(monkeypatch, steps):
    """Makes the gradients of these steps (from 0) look infinite to the optimizer."""
    true_squares, calls = CpuAdam.squares, []

    def squares(self, grad):
        calls.append(None)
        step = (len(calls) - 1) // (CFG["num_hidden_layers"] + 2)
        return torch.tensor([math.inf]) if step in steps else true_squares(self, grad)

    monkeypatch.setattr(CpuAdam, "squares", squares)


def plain_run(batches, asynchronous, skipped):
    """The plain loop with g_t = grad L(w_{t-2}) or grad L(w_{t-1}), and steps left out."""
    with runs.make_store(CFG, torch.float64, asynchronous=asynchronous) as store:
        weights = {name: w.requires_grad_() for name, w in runs.checkpoint_tensors(store).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, betas=runs.BETAS, weight_decay=0.0)
    before = {name: w.detach().clone() for name, w in weights.items()}
    for step, batch in enumerate(batches):
        at = {n: w.clone().requires_grad_() for n, w in before.items()} if asynchronous else weights
        gradients = torch.autograd.grad(plain.loss(at, CFG, batch), list(at.values()))
        before = {name: w.detach().clone() for name, w in weights.items()}
        if step not in skipped:
            for w, g in zip(weights.values(), gradients, strict=True):
                w.grad = g
            optimizer.step()
    return weights


@UPDATES
@pytest.mark.parametrize("skipped", [{0}, {2}, {1, 2}, {2, 4}])
def test_equals_the_plain_loop_that_skips(asynchronous, skipped, monkeypatch):
    batches = plain.make_batches(6)
    expected = plain_run(batches, asynchronous, skipped)
    spoil(monkeypatch, skipped)
    _, norms, got, _ = runs.run(CFG, batches, PLAN, asynchronous=asynchronous, dtype=torch.float64)
    assert {step for step, norm in enumerate(norms) if math.isinf(norm)} == skipped
    assert all((got[name] - expected[name]).abs().max() < 1e-10 for name in expected)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_checkpoint_right_after_a_skipped_step_goes_on_the_same(asynchronous, monkeypatch, tmp_path):
    batches = plain.make_batches(6)
    expected = plain_run(batches, asynchronous, {2})
    (tmp_path / "config.json").write_text("{}")
    spoil(monkeypatch, {2})
    with runs.make_store(CFG, torch.float64, asynchronous=asynchronous) as store:
        runs.run(CFG, batches[:3], PLAN, asynchronous=asynchronous, store=store)
        checkpoint = save_state(tmp_path, store.units, step=3, meta={"model_dir": str(tmp_path)})
    with runs.make_store(CFG, torch.float64, asynchronous=asynchronous, seed=9) as store:
        load_state(checkpoint, store.units)
        *_, got, _ = runs.run(CFG, batches[3:], PLAN, asynchronous=asynchronous, store=store, applied=2)
    assert all((got[name] - expected[name]).abs().max() < 1e-10 for name in expected)
