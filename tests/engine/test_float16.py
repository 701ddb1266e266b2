"""Training in float16: the plain loop with float32 masters and a dynamic loss scale, to the bit."""

import math
import time

import pytest
import torch

from rptrain.checkpoint.state import load_state, save_state
from rptrain.engine.optim.loss_scale import UNSCALED, LossScale
from rptrain.engine.reproducible import Reproducible
from tests.cases import UPDATES, grid

from . import half, plain, runs

CFG = plain.config(tie_word_embeddings=True)
STAGES = ("F0-1 F2-3 FB4-4 B2-3 B0-1", "FB0-4")
OPTIONS = {"weight_decay": 0.1, "max_grad_norm": 1.0}
RATE = 2e-3
START = LossScale.start(2.0**15, 2)  # the largest that the model below takes, so that it soon grows too large


def state_of(store):
    """The newest weights, the masters and the moments, copied."""
    units = store.units
    return [tensor.clone() for u in units for tensor in (u.params[u.current], u.masters, *u.moments.values())]


def train(store, batches, plan, *, asynchronous, scale=START, applied=0, **options):
    """(losses, results of the steps, loss scale and applied steps at the end)."""
    tokens = batches[0].sequences * batches[0].length
    options = {**OPTIONS, **options}
    with runs.engine_of(
        store, plan, tokens=tokens, asynchronous=asynchronous, loss_scale=scale, applied=applied, **options
    ) as engine:
        pending = [(engine.forward_backward(batch), engine.step(RATE)) for batch in batches]
        engine.synchronize()
        losses, steps = [loss.result() for loss, _ in pending], [step.result() for _, step in pending]
        return losses, steps, engine.loss_scale, engine.applied


def run(batches, plan, *, asynchronous, cfg=CFG, scale=START, wide_grad=False, **options):
    with runs.make_store(cfg, torch.float16, asynchronous=asynchronous, wide_grad=wide_grad) as store:
        losses, steps, end, _ = train(store, batches, plan, asynchronous=asynchronous, scale=scale, **options)
        return losses, steps, end, state_of(store)


@pytest.mark.parametrize("tied", [grid(False, id="untied"), pytest.param(True, id="tied")])
@UPDATES
def test_equals_the_plain_loop_to_the_bit(asynchronous, tied):
    """The scale doubles every two good steps, until gradients overflow: some steps in the middle are skipped."""
    cfg = plain.config(tie_word_embeddings=tied)
    batches = plain.make_batches(14)
    with runs.make_store(cfg, torch.float16, asynchronous=asynchronous) as store:
        spec = store.spec
        weights = [{name: w.clone() for name, w in store.weights(i).items()} for i in range(len(spec.units))]
        losses, norms, skipped, scales, masters = half.train(
            spec, weights, batches, rate=RATE, betas=runs.BETAS, delayed=asynchronous, scale=START.scale,
            growth_steps=START.growth_steps, **OPTIONS,
        )  # fmt: skip
        assert any(skipped[5:-2]) and not any(skipped[:5]), "gradients must overflow in the middle"
        assert max(scales) > START.scale and max(norm for norm in norms if math.isfinite(norm)) > 1
        got_losses, steps, _, _ = train(store, batches, f"{STAGES[0]} | N=2 M=4 MR=4", asynchronous=asynchronous)
        assert [step.skipped for step in steps] == skipped
        assert [step.loss_scale for step in steps] == scales
        assert got_losses == losses
        finite = [(step.grad_norm, norm) for step, norm in zip(steps, norms, strict=True) if math.isfinite(norm)]
        assert all(ours == pytest.approx(theirs, rel=1e-12) for ours, theirs in finite)
        for state, expected in zip(store.units, masters, strict=True):
            ours = state.unit.views(state.masters)
            assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
            assert torch.equal(state.params[state.current], state.masters.half())


def assert_same(run, other):
    assert repr(run[:3]) == repr(other[:3])  # the norm of a skipped step may be NaN
    assert all(torch.equal(a, b) for a, b in zip(run[3], other[3], strict=True))


@UPDATES
@pytest.mark.parametrize("size", [grid(4, id="one-round"), pytest.param(2, id="two-rounds")])
def test_same_bits_on_any_number_of_workers_and_any_plan(asynchronous, size):
    batches = plain.make_batches(6)
    options = {"asynchronous": asynchronous, "wide_grad": size == 2, "scale": LossScale.start(2.0**18, 1)}
    one = run(batches, f"{STAGES[0]} | N=1 M=4 MR={size}", **options)
    assert {step.skipped for step in one[1]} == {False, True}
    for stages, workers in ((0, 2), (0, 3), (1, 2)):
        assert_same(run(batches, f"{STAGES[stages]} | N={workers} M=4 MR={size}", **options), one)


@pytest.mark.parametrize("workers", [grid(1), 2])
@UPDATES
def test_when_an_outcome_is_known_changes_no_scale(asynchronous, workers):
    batches = plain.make_batches(6)
    plan, scale = f"{STAGES[0]} | N={workers} M=4 MR=4", LossScale.start(2.0**18, 1)
    reference = run(batches, plan, asynchronous=asynchronous, scale=scale)
    assert len({step.loss_scale for step in reference[1]}) > 2
    for slow in ("optimizer", "gradient rows", "F0-1"):

        def probe(where, slow=slow):
            if where.startswith(slow):
                time.sleep(0.01)

        assert_same(run(batches, plan, asynchronous=asynchronous, scale=scale, probe=probe), reference)


@UPDATES
@pytest.mark.parametrize("moments", [grid("fp32"), "int8"])
def test_goes_on_from_a_checkpoint_anywhere_the_same(asynchronous, moments, tmp_path):
    """Also right behind a skipped step, and between the two of one scale that are skipped in async."""
    batches, plan = plain.make_batches(8), f"{STAGES[1]} | N=1 M=4 MR=4"
    (tmp_path / "config.json").write_text("{}")
    kind = {"asynchronous": asynchronous, "moments": moments}
    scale = LossScale.start(2.0**18, 2)
    with runs.make_store(CFG, torch.float16, **kind) as store:
        losses, steps, end, _ = train(store, batches, plan, asynchronous=asynchronous, scale=scale)
        expected = state_of(store)
    skipped = [step.skipped for step in steps]
    assert any(skipped) and not all(skipped[-3:])
    for done in (1, 3, 5):
        with runs.make_store(CFG, torch.float16, **kind) as store:
            *_, half_way, applied = train(store, batches[:done], plan, asynchronous=asynchronous, scale=scale)
            path = save_state(tmp_path, store.units, step=done, meta={"model_dir": str(tmp_path)})
        with runs.make_store(CFG, torch.float16, seed=9, **kind) as store:
            load_state(path, store.units)
            options = {"asynchronous": asynchronous, "scale": half_way, "applied": applied}
            got = train(store, batches[done:], plan, **options)
            assert repr(got[:3]) == repr((losses[done:], steps[done:], end))
            assert all(torch.equal(a, b) for a, b in zip(state_of(store), expected, strict=True))


@pytest.mark.long
def test_learns_as_float32_does():
    batches, plan = plain.make_batches(10), f"{STAGES[0]} | N=2 M=4 MR=4"
    with runs.make_store(CFG, torch.float32, asynchronous=False) as store:
        exact, *_ = train(store, batches, plan, asynchronous=False, scale=UNSCALED)
    half_losses, steps, *_ = run(batches, plan, asynchronous=False)
    assert half_losses[0] != exact[0]
    assert half_losses == pytest.approx(exact, rel=5e-3)
    assert any(step.skipped for step in steps) or len({step.loss_scale for step in steps}) > 3


# The rules


def outcomes(text, *, asynchronous, growth_steps=3):
    """The scales that steps used, given which of them are skipped (x)."""
    scale, used = LossScale.start(64.0, growth_steps), []
    for outcome in text:
        used.append(int(scale.used(asynchronous=asynchronous)))
        scale = scale.after(asynchronous=asynchronous, skipped=outcome == "x")
    return used


@pytest.mark.parametrize(
    ("text", "sync", "late"),
    [
        ("....", [64, 64, 64, 128], [64, 64, 64, 64]),
        (".......", [64, 64, 64, 128, 128, 128, 256], [64, 64, 64, 64, 128, 128, 128]),
        ("x..", [64, 32, 32], [64, 64, 32]),
        ("xx.", [64, 32, 16], [64, 64, 32]),  # in async the second one had the same scale: halved once
        ("xxx.", [64, 32, 16, 8], [64, 64, 32, 32]),
        ("xxxx.", [64, 32, 16, 8, 4], [64, 64, 32, 32, 16]),
        ("..x...", [64, 64, 64, 32, 32, 32], [64, 64, 64, 64, 32, 32]),
        # In async the step behind the third ran with 64 still: it overflowed at that, not at 128.
        ("...x..", [64, 64, 64, 128, 64, 64], [64, 64, 64, 64, 128, 32]),
        # A good step with the scale before does not count: growth takes three of the new one.
        ("x.....", [64, 32, 32, 32, 64, 64], [64, 64, 32, 32, 32, 32]),
        ("x......", [64, 32, 32, 32, 64, 64, 64], [64, 64, 32, 32, 32, 32, 64]),
    ],
)
def test_which_outcome_changes_which_scale(text, sync, late):
    assert outcomes(text, asynchronous=False) == sync
    assert outcomes(text, asynchronous=True) == late


@UPDATES
def test_without_growth_steps_it_never_changes(asynchronous):
    assert outcomes("x.x....", asynchronous=asynchronous, growth_steps=0) == [64] * 7


# Sums in float16


def test_sums_in_float16_are_asked_for_while_an_engine_is_open():
    matmul = torch.backends.cuda.matmul
    for before in (False, True):
        matmul.allow_fp16_accumulation = before
        try:
            for wanted in (False, True):
                settings = Reproducible(cuda=False, fp16_accumulation=wanted)
                assert matmul.allow_fp16_accumulation == wanted
                settings.restore()
                assert matmul.allow_fp16_accumulation == before
        finally:
            matmul.allow_fp16_accumulation = False
