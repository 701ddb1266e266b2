"""Steps with fewer micro-batches than the plan: no padding is computed, and the bits are those of padded steps."""

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from rptrain.kernels.batch import IGNORED
from rptrain.schedule.plan import Plan
from tests.cases import BOTH, UPDATES

from . import plain, runs

SMALL = plain.config(num_hidden_layers=2, tie_word_embeddings=True)
AUX = plain.GPT_OSS | {"num_hidden_layers": 2, "router_aux_loss_coef": 0.7}
STAGES = "F0-0 F1-1 FB2-2 B1-1 B0-0"
PLANS = [  # fewer rounds than groups have; groups without any micro-batch; more devices than a round has stages
    "N=1 M=6 MR=6",
    "N=2 M=6 MR=6",
    "N=2 M=6 MR=1",
    "N=7 M=6 MR=1",
    "N=3 M=6 MR=2",
    "N=2 M=6 MR=3 R=2",
    "N=1 M=6 MR=1 R=2",
    "N=6 M=6 MR=1 R=3",
    "N=2 M=6 MR=2 R=3",
]


def short(batch, count):
    """The batch's first micro-batches alone."""
    labels = batch.labels[:count]
    return replace(
        batch,
        input_ids=batch.input_ids[:count],
        positions=batch.positions[:count],
        labels=labels,
        documents=batch.documents[:count],
        supervised=int((labels != IGNORED).sum()),
        full=len(batch.input_ids),
    )


def padded(batch):
    """The same tokens with whole micro-batches of padding, as if these were data."""
    missing, (_, tokens) = batch.full - len(batch.input_ids), batch.input_ids.shape
    empty = torch.zeros(missing, tokens, dtype=torch.int64)
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, empty]),
        positions=torch.cat([batch.positions, torch.arange(batch.length).repeat(missing, batch.sequences)]),
        labels=torch.cat([batch.labels, torch.full_like(empty, IGNORED)]),
        documents=(*batch.documents, *[(batch.length,) * batch.sequences] * missing),
    )


def some_short(counts):
    return [short(batch, count) for batch, count in zip(plain.make_batches(len(counts), 6), counts, strict=True)]


@pytest.mark.sample(3, gate=5)
@BOTH
@pytest.mark.parametrize("plan", PLANS)
def test_padding_is_not_computed_and_no_bit_differs(plan, asynchronous):
    batches = some_short([6, 1, 4, 3, 6, 2, 6])
    options = {"asynchronous": asynchronous, "dtype": torch.bfloat16, "max_grad_norm": 1.0, "trace": True}
    losses, norms, weights, spans = runs.run(SMALL, batches, f"{STAGES} | {plan}", **options)
    expected = runs.run(SMALL, [*map(padded, batches)], f"{STAGES} | {plan}", **options)
    assert (losses, norms) == expected[:2]
    assert all(torch.equal(weights[name], expected[2][name]) for name in weights)
    computed = Counter((span.iteration, span.slot.stage) for span in spans)
    assert set(computed.values()) <= {len(batch.input_ids) for batch in batches}
    assert all(computed[i, stage] == len(batches[i].input_ids) for i, stage in computed)
    assert len(computed) == 5 * len(batches)


def test_stages_that_do_not_fit_in_the_buffer_together_do_not_overlap():
    """In full iterations, B0-2 and F0-2 never follow one another on a device. Passes of B0-2 are slow here."""
    plan, cfg = "F0-2 F3-3 FB4-4 B3-3 B0-2 | N=2 M=4 MR=2", plain.config(num_hidden_layers=4, tie_word_embeddings=True)
    counts = [4, 2, 4, 2, 4]
    batches = [short(batch, count) for batch, count in zip(plain.make_batches(5), counts, strict=True)]

    def slow(where):
        if ":B0-2" in where and "micro-batch" in where:
            time.sleep(0.01)

    found = runs.run(cfg, batches, plan, asynchronous=True, probe=slow)
    expected = runs.run(cfg, [*map(padded, batches)], plan, asynchronous=True)
    assert found[:2] == expected[:2]
    assert all(torch.equal(found[2][name], expected[2][name]) for name in found[2])


@UPDATES
def test_the_loss_of_routers_is_that_of_padded_steps(asynchronous):
    batches = some_short([2, 6, 5])
    plan = f"{STAGES} | N=2 M=6 MR=3"
    found, expected = (
        runs.run(AUX, steps, plan, asynchronous=asynchronous) for steps in (batches, [*map(padded, batches)])
    )
    assert found[:2] == expected[:2]
    assert all(torch.equal(found[2][name], expected[2][name]) for name in found[2])


@pytest.mark.parametrize("plan", ["N=2 M=6 MR=6", "N=2 M=6 MR=2", "N=4 M=6 MR=3 R=2"])
def test_short_evaluations_are_those_of_padded_batches(plan):
    batches, (other,) = some_short([6, 2]), some_short([3])
    found = []
    for evaluated in (other, padded(other)):
        parsed = Plan.parse(f"{STAGES} | {plan}")
        kind = {"wide_grad": parsed.rounds > 1, "replicas": parsed.replicas}
        with runs.make_store(SMALL, torch.float32, asynchronous=True, **kind) as store:
            tokens = other.sequences * other.length
            with runs.engine_of(store, parsed, tokens=tokens) as engine:
                for batch in batches:
                    found.append(engine.evaluate(evaluated))
                    engine.forward_backward(batch)
                    engine.step(1e-2)
                found.append(engine.evaluate(evaluated))
    assert found[:3] == found[3:] and len(set(found)) == 3
