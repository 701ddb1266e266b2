"""Low-rank adapters: y = x W.T + s (dropout(x) A.T) B.T, several on one input; gradients of A, B and x.

Adapters that share an input (of q, k and v; of gate and up) share its dropout and one product with A: their A are
stacked in [R, in], R the sum of their ranks, and each B [out, rank] adds to its columns of the stacked output. Nothing
is kept for backward: the product with A is computed again where dropout(x) is needed anyway.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from rptrain.kernels.dropout import Dropout, add_dropout, dropout
from rptrain.kernels.linear import accumulate_weight_grad, linear


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], starts: Sequence[int], scale: float, drop: Dropout | None
) -> None:
    """Adds the adapters' outputs to y [T, out], x's product with the frozen weight.

    `starts` are the first columns of each adapter's output.
    """
    h = linear(_dropped(x, drop), a)
    for columns, ranks, weight in parts(b, starts):
        y[:, columns].addmm_(h[:, ranks], weight.t(), alpha=scale)


def lora_backward_input(
    dy: Tensor, a: Tensor, b: Sequence[Tensor], starts: Sequence[int], scale: float, drop: Dropout | None, dx: Tensor
) -> Tensor:
    """Adds the adapters' part to dx; returns dh [T, R], the gradient of the product with A."""
    dh = dy.new_empty(len(dy), len(a))
    for columns, ranks, weight in parts(b, starts):
        dh[:, ranks] = dy[:, columns] @ weight
    dh.mul_(scale)
    if drop is None:
        dx.addmm_(dh, a)
    else:
        add_dropout(dx, dh @ a, drop)
    return dh


def lora_backward_weights(
    dy: Tensor,
    dh: Tensor,
    x: Tensor,
    a: Tensor,
    starts: Sequence[int],
    scale: float,
    drop: Dropout | None,
    grad_a: Tensor,
    grad_b: Sequence[Tensor],
) -> None:
    """Adds the gradients of A and of each B to theirs, of the wide type; `dh` is that of `lora_backward_input`."""
    dropped = _dropped(x, drop)
    accumulate_weight_grad(grad_a, dh, dropped)
    h = linear(dropped, a).mul_(scale)
    for columns, ranks, grad in parts(grad_b, starts):
        accumulate_weight_grad(grad, dy[:, columns], h[:, ranks])


def _dropped(x: Tensor, drop: Dropout | None) -> Tensor:
    return x if drop is None else dropout(x, drop)


def parts(b: Sequence[Tensor], starts: Sequence[int]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Each adapter's columns of the output, its columns of h, and its B or the gradient of that."""
    first = 0
    for weight, start in zip(b, starts, strict=True):
        outer, rank = weight.shape
        yield slice(start, start + outer), slice(first, first + rank), weight
        first += rank
