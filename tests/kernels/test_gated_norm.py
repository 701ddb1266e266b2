"""The gated norm's kernels against the reference."""

import pytest
import torch
from torch import Tensor

from rptrain.kernels import gated_norm as ours
from rptrain.kernels.reference import gated_norm as reference

from .delta_net import Sizes, product, views
from .exact import close, dtypes, no_worse, random

EPS = 1e-3


def results(triton: bool, dy: Tensor, x: Tensor, qkvz: Tensor, weight: Tensor, sizes: Sizes, by_head: bool):
    """y, dx, the gradient of the product, and that of the weight."""
    forward, backward = (
        (ours.gated_norm_triton, ours.gated_norm_backward_triton)
        if triton
        else (reference.gated_norm, reference.gated_norm_backward)
    )
    z = views(qkvz, sizes, by_head)[3]
    y = forward(x, z, weight, EPS)
    grad, grad_w = torch.zeros_like(qkvz), torch.ones_like(weight, dtype=reference.wide(x.dtype))
    dx = backward(dy, x, z, weight, EPS, views(grad, sizes, by_head)[3], grad_w)
    z = views(qkvz.clone(), sizes, by_head)[3]
    assert torch.equal(backward(dy, x, z, weight, EPS, z, None), dx)
    assert torch.equal(z, views(grad, sizes, by_head)[3])
    return y, dx, grad, grad_w - 1


@pytest.mark.sample(5)
@dtypes
@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [(Sizes(2, 3, 3, 40, 4), 19), (Sizes(1, 1, 2, 1, 4), 1), (Sizes(3, 2, 1, 16, 4), 40), (Sizes(1, 2, 4, 130, 4), 7)],
)
@pytest.mark.parametrize("by_head", [False, True])
def test_forward_and_backward(sizes, tokens, by_head, dtype, device, monkeypatch) -> None:
    monkeypatch.setattr(ours, "SIZES", ours.Sizes(256, 1, 1))
    qkvz = product(tokens, sizes, dtype, device)
    heads = sizes.heads * sizes.repeat
    x, weight = random((tokens, heads, sizes.values), dtype, device, 1), random((sizes.values,), dtype, device, 2)
    dy = random((tokens, heads * sizes.values), dtype, device, 3)
    found = results(True, dy, x, qkvz, weight, sizes, by_head)
    theirs = results(False, dy, x, qkvz, weight, sizes, by_head)
    wide = results(False, dy.double(), x.double(), qkvz.double(), weight.double(), sizes, by_head)
    for one, other, exact in zip(found[:3], theirs, wide, strict=False):
        no_worse(one, other, exact)
    close(found[3], wide[3])


def test_no_tokens(device) -> None:
    sizes = Sizes(1, 1, 4, 4, 4)
    qkvz, x, dy = (torch.empty(shape, device=device) for shape in ((0, 16), (0, 1, 4), (0, 4)))
    y, dx, _, grad_w = results(True, dy, x, qkvz, torch.ones(4, device=device), sizes, False)
    assert y.shape == (0, 4) and dx.shape == (0, 1, 4) and not grad_w.any()
