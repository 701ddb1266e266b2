"""Tokens' rows gathered by expert, and what the experts make of them combined into tokens again.

Suffixes as in kernels/reference/moe.py. Sums over a token's experts are in float32, in the order of its choice.
"""

from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.launch import fused, jit, power_of_2, tl, triton, warps
from rptrain.kernels.moe import Permutation
from rptrain.kernels.reference import moe as reference
from rptrain.kernels.reference.dense import wide

WIDEST = 4096  # columns at a time


def gather(x_TD: Tensor, perm: Permutation) -> Tensor:
    """The tokens' rows by expert: [N, D]. Its backward is `combine` without weights."""
    if not fused(x_TD):
        return reference.gather(x_TD, perm.order, perm.places.shape[1])
    return gather_triton(x_TD, perm)


def combine(rows_ND: Tensor, perm: Permutation, weights_TX: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, weighted or not: [T, D], rounded once."""
    if not fused(rows_ND):
        return reference.combine(rows_ND, perm.places, weights_TX)
    return combine_triton(rows_ND, perm, weights_TX)


def combine_backward(dy_TD: Tensor, rows_ND: Tensor, perm: Permutation, weights_TX: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the rows, [N, D], and of the weights, [T, X] in the wide type."""
    if fused(dy_TD, rows_ND):
        return combine_backward_triton(dy_TD, rows_ND, perm, weights_TX)
    dy_ND = reference.gather(dy_TD, perm.order, perm.places.shape[1])
    drows, _, dweights = reference.weigh(dy_ND, rows_ND, weights_TX, perm.order)
    return drows, dweights


def router_weight_grad(dact_NI: Tensor, act_NI: Tensor, perm: Permutation, weights_TX: Tensor) -> Tensor:
    """The weights' gradient, [T, X] in the wide type, without the experts' outputs; multiplies both by the weights.

    y = w (act @ down), so dw = dy @ (act @ down) = (dy @ down.T) @ act: given the gradient dy of each row's token
    times down.T, and act, this leaves in their place the gradient of act, and the rows whose products with dy make
    up the gradient of down. Where down has a bias b, dw lacks dy @ b.
    """
    if fused(dact_NI, act_NI):
        return weigh_triton(dact_NI, act_NI, perm, weights_TX)
    dact, act, dweights = reference.weigh(dact_NI, act_NI, weights_TX, perm.order)
    dact_NI.copy_(dact)
    act_NI.copy_(act)
    return dweights


def token_weight_grad(dact_TI: Tensor, act_TI: Tensor, weights_T1: Tensor) -> Tensor:
    """`router_weight_grad` of a single expert that all tokens go through, in their order: [T, 1]."""
    order = torch.arange(len(act_TI), dtype=torch.int32, device=act_TI.device)
    return router_weight_grad(dact_TI, act_TI, Permutation(order, order[:, None], order[-1:] + 1), weights_T1)


def gather_triton(x_TD: Tensor, perm: Permutation) -> Tensor:
    """`gather` as a kernel; this and the others take contiguous tensors."""
    tokens, active = perm.places.shape
    width = x_TD.shape[1]
    out = x_TD.new_empty(tokens * active, width)
    sizes = _columns(width)
    grid = (tokens, triton.cdiv(width, sizes["BLOCK"]))
    _gather_kernel[grid](x_TD, perm.places, out, ACTIVE=active, **sizes)
    return out


def combine_triton(rows_ND: Tensor, perm: Permutation, weights_TX: Tensor | None = None) -> Tensor:
    tokens, active = perm.places.shape
    width = rows_ND.shape[1]
    out = rows_ND.new_empty(tokens, width)
    sizes = _columns(width)
    grid = (tokens, triton.cdiv(width, sizes["BLOCK"]))
    _combine_kernel[grid](
        rows_ND, perm.places, weights_TX, out, ACTIVE=active, WEIGHTED=weights_TX is not None, **sizes
    )
    return out


def combine_backward_triton(
    dy_TD: Tensor, rows_ND: Tensor, perm: Permutation, weights_TX: Tensor
) -> tuple[Tensor, Tensor]:
    drows = torch.empty_like(rows_ND)
    return drows, _weigh(dy_TD, rows_ND, drows, None, perm, weights_TX)


def weigh_triton(dact_NI: Tensor, act_NI: Tensor, perm: Permutation, weights_TX: Tensor) -> Tensor:
    return _weigh(dact_NI, act_NI, dact_NI, act_NI, perm, weights_TX)


def _weigh(grads: Tensor, rows: Tensor, dact: Tensor, act: Tensor | None, perm: Permutation, weights: Tensor) -> Tensor:
    """Gradients by token where `act` is None, by row otherwise."""
    by_token = act is None
    dweights = torch.empty_like(weights, dtype=wide(weights.dtype))
    _weigh_kernel[(perm.order.numel(),)](
        grads, rows, weights, perm.places if by_token else perm.order, dact, act, dweights, weights.shape[1],
        BY_TOKEN=by_token, **_columns(rows.shape[1]),
    )  # fmt: skip
    return dweights


def _columns(width: int) -> dict[str, Any]:
    block = min(power_of_2(width), WIDEST)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(warps(block), 8)}


@jit
def _gather_kernel(x, places, out, ACTIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A token a program: it is read once, and written to each of its places."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    row = tl.load(x + token * WIDTH + columns, mask=mask)
    for number in range(ACTIVE):
        place = tl.load(places + token * ACTIVE + number).to(tl.int64)
        tl.store(out + place * WIDTH + columns, row, mask=mask)


@jit
def _combine_kernel(
    rows, places, weights, out,
    ACTIVE: tl.constexpr, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(ACTIVE):
        place = tl.load(places + token * ACTIVE + number).to(tl.int64)
        row = tl.load(rows + place * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * ACTIVE + number).to(tl.float32)
        total += row
    tl.store(out + token * WIDTH + columns, total.to(out.dtype.element_ty), mask=mask)


@jit
def _weigh_kernel(
    grads, rows, weights, other, dact, act, dweights, active,
    BY_TOKEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program, in the order that the gradients lie in; `other` is its number in the other order.

    So the rows of a token are taken at about the same time, and its gradient comes from memory once.
    """
    program = tl.program_id(0).to(tl.int64)
    place = tl.load(other + program).to(tl.int64)
    slot, row = (program, place) if BY_TOKEN else (place, program)
    weight = tl.load(weights + slot).to(tl.float32)
    source = slot // active if BY_TOKEN else row
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        grad = tl.load(grads + source * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(rows + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        total += grad * value
        tl.store(dact + row * WIDTH + columns, (grad * weight).to(dact.dtype.element_ty), mask=mask)
        if not BY_TOKEN:
            tl.store(act + row * WIDTH + columns, (value * weight).to(act.dtype.element_ty), mask=mask)
    tl.store(dweights + slot, tl.sum(total, 0))
