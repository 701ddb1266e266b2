"""Low-rank adapters: y = x W.T + s (dropout(x) A.T) B.T, several on one input; gradients of A, B and x.

Adapters that share an input (of q, k and v; of gate and up) share its dropout and one product with A: their A are
stacked in [R, in], R the sum of their ranks, and each B [out, rank] adds to its columns of the stacked output.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.dropout import Dropout, add_dropout, dropout
from rptrain.kernels.linear import accumulate_weight_grad, linear
from rptrain.kernels.reference import wide


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], starts: Sequence[int], scale: float, drop: Dropout | None
) -> Tensor:
    """Adds the adapters' outputs to y [T, out], x's product with the frozen weight; returns h [T, R] for backward.

    `starts` are the first columns of each adapter's output.
    """
    h = linear(_dropped(x, drop), a)
    for columns, ranks, weight in _parts(b, starts):
        y[:, columns].addmm_(h[:, ranks], weight.t(), alpha=scale)
    return h


def lora_backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    a: Tensor,
    b: Sequence[Tensor],
    starts: Sequence[int],
    scale: float,
    drop: Dropout | None,
    dx: Tensor,
    grad_a: Tensor,
    grad_b: Sequence[Tensor],
) -> None:
    """Adds the adapters' part to dx, and the gradients of A and of each B to theirs, of the wide type."""
    dh, scaled = torch.empty_like(h), h * scale
    for (columns, ranks, weight), grad in zip(_parts(b, starts), grad_b, strict=True):
        part = dy[:, columns]
        accumulate_weight_grad(grad, part, scaled[:, ranks])
        dh[:, ranks] = part @ weight
    dh.mul_(scale)
    accumulate_weight_grad(grad_a, dh, _dropped(x, drop))
    if drop is None:
        dx.addmm_(dh, a)
    else:
        add_dropout(dx, dh @ a, drop)


class AddLoRA(torch.autograd.Function):
    """`add_lora` for autograd, not in place: y, x, a, starts, scale, drop, then each b."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, a: Tensor, starts: Sequence[int], scale: float, drop: Dropout | None, *b: Tensor
    ) -> Tensor:
        y = y.clone()
        ctx.save_for_backward(x, add_lora(y, x, a, b, starts, scale, drop), a, *b)
        ctx.form = (starts, scale, drop)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, h, a, *b = ctx.saved_tensors
        dx = torch.zeros_like(x)
        grad_a, *grad_b = (torch.zeros_like(weight, dtype=wide(weight.dtype)) for weight in (a, *b))
        starts, scale, drop = ctx.form
        lora_backward(grad_outputs[0], x, h, a, b, starts, scale, drop, dx, grad_a, grad_b)
        grads = (grad.to(a.dtype) for grad in (grad_a, *grad_b))
        return grad_outputs[0], dx, next(grads), None, None, None, *grads


def _dropped(x: Tensor, drop: Dropout | None) -> Tensor:
    return x if drop is None else dropout(x, drop)


def _parts(b: Sequence[Tensor], starts: Sequence[int]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Each adapter's columns of the output, its columns of h, and its B."""
    first = 0
    for weight, start in zip(b, starts, strict=True):
        outer, rank = weight.shape
        yield slice(start, start + outer), slice(first, first + rank), weight
        first += rank
