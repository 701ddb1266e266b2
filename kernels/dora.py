"""DoRA: the rows of W + s B A, scaled to trained norms (Liu et al. 2024, arXiv 2402.09353).

With m the trained norms, y = m / |W + s B A| (x W.T + s x A.T B.T). The norm of a row counts as a constant in
backward (section 4.3 of the paper). Products with A, B and W are those of kernels/lora.py, with a scaled gradient of y.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rptrain.kernels.linear import Weight, linear
from rptrain.kernels.lora import parts
from rptrain.kernels.reference.dense import wide

TOKENS = 2048  # tokens whose products are recomputed at a time


@torch.no_grad()
def row_norms(w: Tensor, a: Tensor, b: Sequence[Tensor], starts: Sequence[int], scale: float) -> Tensor:
    """The norms of the rows of W + s B A with an adapter, [the parts' widths together], in the dtype of W.

    W + s B A is never stored: |w + s b A|^2 = |w|^2 + 2 s (w A.T) b + s^2 b (A A.T) b. Rounded as in PEFT, so a new
    adapter, whose m is this norm, scales by 1 (but not in FP8, where W is rounded).
    """
    found = []
    for rows, ranks, weight in parts(b, starts):
        low, high = a[ranks], weight.to(wide(w.dtype))
        squares = torch.linalg.vector_norm(w[rows], dim=1, dtype=high.dtype).square_()
        gram = low.to(high.dtype) @ low.to(high.dtype).t()
        both = 2 * (w[rows] @ low.t()) + scale * (high @ gram)
        squares += scale * (both * high).sum(1)
        found.append(squares.sqrt_().to(w.dtype))
    return torch.cat(found)


def rescale(y: Tensor, factors: Tensor, widths: Sequence[int], starts: Sequence[int]) -> Tensor:
    """Multiplies the columns of y [T, out] that have an adapter, in place."""
    for start, part in zip(starts, factors.split(list(widths)), strict=True):
        y[:, start : start + len(part)].mul_(part)
    return y


def magnitude_backward(
    dy: Tensor,
    x: Tensor,
    w: Weight,
    a: Tensor,
    b: Sequence[Tensor],
    starts: Sequence[int],
    scale: float,
    norms: Tensor,
    grad: Tensor,
) -> None:
    """Adds the gradient of m to `grad`, of the wide type: the columns of dy times those of what m scales.

    The scaled tensor is recomputed, for some tokens at a time.
    """
    for dy_part, x_part in zip(dy.split(TOKENS), x.split(TOKENS), strict=True):
        h = linear(x_part, a)
        sums = []
        for columns, ranks, weight in parts(b, starts):
            rows = w[columns] if isinstance(w, Tensor) else w.part(columns)
            y = linear(x_part, rows).addmm_(h[:, ranks], weight.t(), alpha=scale)
            sums.append((dy_part[:, columns].to(grad.dtype) * y).sum(0))
        grad += torch.cat(sums).div_(norms)
