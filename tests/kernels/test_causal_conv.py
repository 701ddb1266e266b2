"""The convolution's kernels against the reference, and documents against each alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rptrain.kernels import causal_conv as ours
from rptrain.kernels.launch import power_of_2
from rptrain.kernels.reference import causal_conv as reference

from .delta_net import Sizes, positions_of, product, views
from .exact import close, dtypes, no_worse, random

CASES = [  # sizes, documents, columns by key head
    (Sizes(2, 1, 24, 40, 4), [5, 1, 4, 2], True),
    (Sizes(1, 2, 8, 6, 3), [20], False),
    (Sizes(1, 3, 5, 2, 2), [1], True),
]


@pytest.fixture
def short(monkeypatch) -> Callable[[Sizes], None]:
    """Four stripes of few tokens for each program."""

    def set_sizes(sizes: Sizes) -> None:
        for kernel in ("FORWARD", "BACKWARD"):
            tile = 4 * power_of_2(sizes.columns)
            monkeypatch.setattr(ours, kernel, ours.Sizes(steps=6, unroll=2, tile=tile, warps=1, stages=1))

    return set_sizes


def results(module, dys: list[Tensor], qkvz: Tensor, weight: Tensor, positions: Tensor, sizes: Sizes, by_head: bool):
    """Outputs, the gradient of the product, and that of the weight."""
    forward, backward = (
        (ours.causal_conv_triton, ours.causal_conv_backward_triton)
        if module is ours
        else (reference.causal_conv, reference.causal_conv_backward)
    )
    q, k, v, _ = views(qkvz, sizes, by_head)
    out = forward(q, k, v, weight, positions)
    grad = torch.zeros_like(qkvz)
    grad_w = torch.ones(weight.shape, dtype=reference.wide(qkvz.dtype), device=qkvz.device)
    dq_in, dk_in, dv_in, _ = views(grad, sizes, by_head)
    dq, dk, dv = dys
    backward(dq, dk, dv, q, k, v, weight, positions, (dq_in, dk_in, dv_in), grad_w)
    return out, grad, grad_w - 1


def inputs(sizes: Sizes, tokens: int, dtype: torch.dtype, device: str):
    qkvz, weight = product(tokens, sizes, dtype, device), random((sizes.channels, 1, sizes.width), dtype, device, 1)
    q, _, v, _ = views(qkvz, sizes, False)
    dys = [random(tuple(x.shape), dtype, device, 2 + i) for i, x in enumerate((q, q, v))]
    return dys, qkvz, weight


def compare(sizes: Sizes, documents: list[int], by_head: bool, dtype: torch.dtype, device: str) -> None:
    dys, qkvz, weight = inputs(sizes, sum(documents), dtype, device)
    rest = positions_of(documents, device), sizes, by_head
    out, grad, grad_w = results(ours, dys, qkvz, weight, *rest)
    theirs, their_grad, _ = results(reference, dys, qkvz, weight, *rest)
    doubles = [dy.double() for dy in dys], qkvz.double(), weight.double()
    wide, wide_grad, wide_grad_w = results(reference, *doubles, *rest)
    for one, other, exact in zip((*out, grad), (*theirs, their_grad), (*wide, wide_grad), strict=True):
        no_worse(one, other, exact)
    close(grad_w, wide_grad_w)


@pytest.mark.sample(3)
@dtypes
@pytest.mark.parametrize(("sizes", "documents", "by_head"), CASES)
def test_forward_and_backward(sizes, documents, by_head, dtype, device, short) -> None:
    short(sizes)
    compare(sizes, documents, by_head, dtype, device)


@pytest.mark.long
def test_sizes_of_the_kernels(device) -> None:
    compare(Sizes(1, 1, 128, 128, 4), [150, 50], False, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_documents_as_each_alone(dtype, device, short) -> None:
    """To the bit, and whatever the others hold."""
    sizes, documents = Sizes(1, 1, 6, 8, 3), [9, 2, 5]
    short(sizes)
    dys, qkvz, weight = inputs(sizes, sum(documents), dtype, device)
    positions = positions_of(documents, device)
    out, grad, _ = results(ours, dys, qkvz, weight, positions, sizes, True)
    parts = [x.split(documents) for x in (*dys, qkvz, *out, grad)]
    for dq, dk, dv, x, *packed, dx in zip(*parts, strict=True):
        alone, grad_alone, _ = results(ours, [dq, dk, dv], x, weight, positions_of([len(x)], device), sizes, True)
        assert all(torch.equal(*pair) for pair in zip(alone, packed, strict=True)) and torch.equal(grad_alone, dx)
    changed = [x.clone() for x in (*dys, qkvz)]
    for x in changed:
        x[9:11] = torch.nan
    again, grad_again, _ = results(ours, changed[:3], changed[3], weight, positions, sizes, True)
    kept = [*range(9), *range(11, 16)]
    pairs = zip((*again, grad_again), (*out, grad), strict=True)
    assert all(torch.equal(one[kept], other[kept]) for one, other in pairs)


def test_no_tokens(device) -> None:
    sizes = Sizes(1, 1, 4, 4, 4)
    dys, qkvz, weight = inputs(sizes, 0, torch.float32, device)
    out, grad, grad_w = results(ours, dys, qkvz, weight, positions_of([0], device), sizes, True)
    assert [x.shape for x in out] == [(0, 1, 4)] * 3 and grad.shape == (0, 16) and not grad_w.any()
