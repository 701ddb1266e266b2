"""Another plan between two steps: the numbers go on to the bit as if there had been one plan."""

import pytest
import torch

from rptrain.schedule.plan import Plan
from tests.cases import BOTH

from . import plain, runs

STEPS, CHANGE = 6, 3
PAIRS = [
    ("F0-1 F2-3 FB4-4 B2-3 B0-1", 2, "F0-2 FB3-4 B2-2 B1-1 B0-0", 2),
    ("F0-2 FB3-4 B2-2 B1-1 B0-0", 1, "FB0-4", 3),
    ("FB0-4", 3, "F0-0 F1-1 F2-2 F3-3 FB4-4 B3-3 B2-2 B1-1 B0-0", 2),
    ("F0-0 F1-1 F2-2 F3-3 FB4-4 B3-3 B2-2 B1-1 B0-0", 3, "F0-1 F2-3 FB4-4 B2-3 B0-1", 1),
]


def tensors(store):
    """Every bit of the training state: both generations in order of age, moments, remainders."""
    found = []
    for state in store.units:
        found += [state.params[state.before], state.params[state.current], *state.moments.values()]
        found += [] if state.remainder is None else [state.remainder]
    return [tensor.clone() for tensor in found]


def trained(cfg, parts, *, asynchronous, dtype, micro_batches=4, between=lambda store: None):
    """Trains on the same batches with one plan after another; (losses, norms, state)."""
    batches = plain.make_batches(STEPS, micro_batches=micro_batches)
    plan = Plan.parse(parts[0][0])
    kind = {"wide_grad": plan.rounds > 1, "replicas": plan.replicas}
    losses, norms, done = [], [], 0
    with runs.make_store(cfg, dtype, asynchronous=asynchronous, **kind) as store:
        for plan, steps in parts:
            if done:
                between(store)
            part = batches[done : done + steps]
            options = {"asynchronous": asynchronous, "applied": done, "max_grad_norm": 1.0, "weight_decay": 0.1}
            got_losses, got_norms, *_ = runs.run(cfg, part, plan, store=store, **options)
            losses, norms, done = losses + got_losses, norms + got_norms, done + steps
        return losses, norms, tensors(store)


def same(one, other):
    return one[:2] == other[:2] and all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


@pytest.mark.sample(2, gate=4)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[1]}-to-{pair[3]}")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@BOTH
@pytest.mark.parametrize("rounds", [1, 2])
def test_another_plan_goes_on_to_the_bit(asynchronous, tied, rounds, pair):
    cfg = plain.config(tie_word_embeddings=tied)
    first, workers, second, later = pair
    ends = f"M=6 MR={6 // rounds}"
    one, other = f"{first} | N={workers} {ends}", f"{second} | N={later} {ends}"
    options = {"asynchronous": asynchronous, "dtype": torch.bfloat16, "micro_batches": 6}
    whole = trained(cfg, [(one, STEPS)], **options)
    assert same(trained(cfg, [(one, CHANGE), (other, STEPS - CHANGE)], **options), whole)
    assert len(set(whole[0])) == STEPS


def test_a_plan_for_each_step():
    plans = [f"{stages} | N={n} M=4 MR=4" for pair in PAIRS for stages, n in (pair[:2], pair[2:])]
    for asynchronous in (False, True):
        options = {"asynchronous": asynchronous, "dtype": torch.float32}
        whole = trained(plain.config(), [(plans[0], STEPS)], **options)
        assert same(trained(plain.config(), [(plan, 1) for plan in plans[:STEPS]], **options), whole)


def test_the_first_iteration_after_the_change_reads_the_weights_before_the_newest():
    """What makes it exact in async: with the newest weights in their place the numbers are others."""

    def forget(store):
        for state in store.units:
            state.before = state.current

    parts = [(f"{PAIRS[0][0]} | N=2 M=4 MR=4", CHANGE), (f"{PAIRS[0][2]} | N=2 M=4 MR=4", STEPS - CHANGE)]
    options = {"asynchronous": True, "dtype": torch.float32}
    right, wrong = (
        trained(plain.config(), parts, between=between, **options) for between in (lambda store: None, forget)
    )
    assert wrong[0][:CHANGE] == right[0][:CHANGE]
    assert wrong[0][CHANGE] != right[0][CHANGE]


def test_the_count_of_applied_steps_is_part_of_the_numbers():
    """Adam's bias correction counts them: an engine that begins from 0 gives other weights."""
    plan, batches = f"{PAIRS[0][0]} | N=2 M=4 MR=4", plain.make_batches(4)
    found = []
    for applied in (2, 0):
        with runs.make_store(plain.config(), torch.float32, asynchronous=False) as store:
            runs.run(None, batches[:2], plan, asynchronous=False, store=store)
            runs.run(None, batches[2:], plan, asynchronous=False, store=store, applied=applied)
            found.append(tensors(store))
    assert not all(torch.equal(a, b) for a, b in zip(*found, strict=True))
