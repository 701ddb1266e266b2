"""Adapters of experts against autograd over each expert's whole weight, and merged into it."""

import pytest
import torch
from torch import Tensor

from rptrain.kernels.grouped_lora import (
    add_grouped_lora,
    add_to_weights,
    grouped_lora_backward_input,
    grouped_lora_backward_weights,
)
from tests.kernels.exact import random

FORMS = [([4], 1, 5, 7), ([0, 5, 0, 3, 1], 3, 6, 4), ([2, 2, 2], 8, 16, 16)]  # rows of each expert; rank, in, out


def operands(counts: list[int], rank: int, inner: int, outer: int, dtype: torch.dtype) -> list[Tensor]:
    """x, y, dy, A, B, and where the rows of experts end."""
    rows, ranks = sum(counts), len(counts) * rank
    shapes = (rows, inner), (rows, outer), (rows, outer), (ranks, inner), (outer, ranks)
    tensors = [random(shape, dtype, "cpu", seed) for seed, shape in enumerate(shapes)]
    return [*tensors, torch.tensor(counts).cumsum(0).int()]


def deltas(a: Tensor, b: Tensor, experts: int) -> Tensor:
    """What is added to each weight [in, out], element by element: A's rows go by expert, B's columns by rank."""
    rank = len(a) // experts
    rows = [sum(torch.outer(a[e * rank + k], b[:, k * experts + e]) for k in range(rank)) for e in range(experts)]
    return 0.7 * torch.stack([torch.as_tensor(each) for each in rows])


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forward_and_every_gradient(form, dtype) -> None:
    counts = form[0]
    x, y, dy, a, b, ends = operands(*form, dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (x, a, b)]
    weights = deltas(*leaves[1:], len(counts))
    exact = y.double() + torch.cat([part @ w for part, w in zip(leaves[0].split(counts), weights, strict=True)])
    exact.backward(dy.double())

    ours, dx = y.clone(), torch.ones_like(x)
    sums = [torch.ones_like(weight, dtype=torch.promote_types(dtype, torch.float32)) for weight in (a, b)]
    add_grouped_lora(ours, x, a, b, ends, 0.7)
    dh = grouped_lora_backward_input(dy, a, b, ends, 0.7, dx)
    grouped_lora_backward_weights(dy, dh, x, a, ends, 0.7, *sums)
    tolerance = 0.04 if dtype == torch.bfloat16 else 1e-5
    found = [(ours, exact), *((grad - 1, leaf.grad) for grad, leaf in zip((dx, *sums), leaves, strict=True))]
    for mine, theirs in found:
        assert theirs is not None
        assert (mine.double() - theirs).abs().max() <= tolerance * max(theirs.abs().max().item(), 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transposed", [False, True])
def test_merging_adds_the_same_to_weights_of_either_layout(form, transposed) -> None:
    *_, a, b, ends = operands(*form, torch.float64)
    experts, (inner, outer) = len(ends), form[2:]
    weight = torch.ones(experts, outer, inner).double().mT if transposed else torch.ones(experts, inner, outer).double()
    add_to_weights(weight, a, b, 0.7)
    torch.testing.assert_close(weight, 1 + deltas(a, b, experts))
