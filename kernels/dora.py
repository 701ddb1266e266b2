"""DoRA: the rows of W + s B A, scaled from their own length to one that is trained (Liu et al. 2024, arXiv 2402.09353).

With m the trained lengths, y = m / |W + s B A| (x W.T + s x A.T B.T). The length of a row is taken for a constant in
backward (section 4.3 there). Products with A, B and W are those of kernels/lora.py, with the gradient of y scaled.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rptrain.kernels.linear import linear
from rptrain.kernels.lora import parts
from rptrain.kernels.reference.dense import wide

TOKENS = 2048  # whose products are computed again at a time


@torch.no_grad()
def row_norms(w: Tensor, a: Tensor, b: Sequence[Tensor], starts: Sequence[int], scale: float) -> Tensor:
    """The lengths of the rows of W + s B A that have an adapter, [the parts' widths together], in the type of W.

    W + s B A is not made: |w + s b A|^2 = |w|^2 + 2 s (w A.T) b + s^2 b (A A.T) b. Rounded as in PEFT, so that a fresh
    adapter, whose m is this, scales by 1.
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
    w: Tensor,
    a: Tensor,
    b: Sequence[Tensor],
    starts: Sequence[int],
    scale: float,
    norms: Tensor,
    grad: Tensor,
) -> None:
    """Adds the gradient of m to `grad`, of the wide type: the columns of dy times those of what m scales.

    That is computed again, for some tokens at a time.
    """
    for dy_part, x_part in zip(dy.split(TOKENS), x.split(TOKENS), strict=True):
        h = linear(x_part, a)
        sums = []
        for columns, ranks, weight in parts(b, starts):
            y = linear(x_part, w[columns]).addmm_(h[:, ranks], weight.t(), alpha=scale)
            sums.append((dy_part[:, columns].to(grad.dtype) * y).sum(0))
        grad += torch.cat(sums).div_(norms)
