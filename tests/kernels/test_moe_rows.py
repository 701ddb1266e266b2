"""Gathering and combining rows against the reference; the gradient of weights with and without the experts' outputs."""

import pytest
import torch

from rptrain.kernels import moe, moe_rows
from rptrain.kernels.reference import moe as reference
from tests.kernels.exact import close, dtypes, no_worse, random

SHAPES = [(1, 1, 1, 1), (5, 4, 4, 3), (9, 7, 2, 130)]  # tokens, experts, chosen, columns
shapes = pytest.mark.parametrize(("tokens", "experts", "active", "columns"), SHAPES)


@pytest.fixture(autouse=True)
def narrow(monkeypatch) -> None:
    monkeypatch.setattr(moe_rows, "WIDEST", 64)  # several blocks a row


def permutation(tokens: int, experts: int, active: int, device: str) -> moe.Permutation:
    return moe.permute(reference.choose(random((tokens, experts), torch.float32, device, 7), active), experts)


@pytest.mark.sample(3)
@shapes
@dtypes
def test_gather_and_combine(tokens, experts, active, columns, dtype, device) -> None:
    perm = permutation(tokens, experts, active, device)
    x, weights = random((tokens, columns), dtype, device), random((tokens, active), dtype, device, 1)
    gathered = moe_rows.gather_triton(x, perm)
    assert torch.equal(gathered[perm.places.long()], x[:, None].expand(-1, active, -1))
    assert torch.equal(gathered, reference.gather(x, perm.order, active))
    rows = random(tuple(gathered.shape), dtype, device, 2)
    for given in (weights, None):
        ours = moe_rows.combine_triton(rows, perm, given)
        exact = reference.combine(rows.double(), perm.places, None if given is None else given.double())
        no_worse(ours, reference.combine(rows, perm.places, given), exact)
        assert torch.equal(ours, moe_rows.combine_triton(rows, perm, given))


@pytest.mark.sample(3)
@shapes
@dtypes
def test_gradients_of_rows_and_weights(tokens, experts, active, columns, dtype, device) -> None:
    perm = permutation(tokens, experts, active, device)
    dy, weights = random((tokens, columns), dtype, device), random((tokens, active), dtype, device, 1)
    rows = random((tokens * active, columns), dtype, device, 2)
    rows64, weights64 = (x.double().requires_grad_() for x in (rows, weights))
    (rows64[perm.places.long()] * weights64[..., None]).sum(1).backward(dy.double())
    drows, dweights = moe_rows.combine_backward_triton(dy, rows, perm, weights)
    theirs = moe_rows.combine_backward(dy.double(), rows.double(), perm, weights.double())
    assert (drows.dtype, dweights.dtype) == (dtype, torch.float32)
    assert rows64.grad is not None and weights64.grad is not None
    close(theirs[0], rows64.grad)
    close(theirs[1], weights64.grad)
    no_worse(drows, rows64.grad.to(dtype), rows64.grad)
    close(dweights, weights64.grad)


@pytest.mark.sample(3)
@shapes
@dtypes
def test_weigh(tokens, experts, active, columns, dtype, device) -> None:
    """In place, on the device and as the reference: products of rows with the weights, and of rows with one another."""
    perm = permutation(tokens, experts, active, device)
    weights = random((tokens, active), dtype, device, 1)
    dact, act = (random((tokens * active, columns), dtype, device, seed) for seed in (2, 3))
    by_place = weights.flatten()[perm.order.long(), None]
    expected = (dact.double() * act.double()).sum(1)[perm.places.long()]
    for weigh in (moe_rows.weigh_triton, moe_rows.router_weight_grad):
        ours = [dact.clone(), act.clone()]
        close(weigh(*ours, perm, weights), expected)
        assert torch.equal(ours[0], dact * by_place)
        assert torch.equal(ours[1], act * by_place)


def test_weigh_gives_the_gradients_of_the_product_and_the_weights() -> None:
    """y = w (act @ down), by autograd; the gradient of down is that of the weighted rows."""
    act, down, weights, dy = (random(shape, torch.float64, "cpu") for shape in [(6, 4), (4, 5), (6, 1), (6, 5)])
    perm = moe.permute(torch.arange(6)[:, None].int() % 3, 3)
    leaves = [x.clone().requires_grad_() for x in (act, weights, down)]
    (leaves[0] @ leaves[2] * leaves[1][perm.order.long()]).backward(dy)
    dact = dy @ down.T
    dweights = moe_rows.router_weight_grad(dact, act, perm, weights)
    for ours, leaf in zip((dact, dweights, act.T @ dy), leaves, strict=True):
        assert leaf.grad is not None
        close(ours, leaf.grad)
