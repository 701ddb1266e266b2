"""Routing of a mixture of experts: which experts a token goes to, with what weights, and the balance of their load.

The choice is made once, by `choose`, and passed in wherever routing is computed again: rounding could change it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.launch import HAS_TRITON, fused, jit, power_of_2, tl, triton, warps
from rptrain.kernels.reference import moe as reference
from rptrain.kernels.reference.dense import wide
from rptrain.kernels.reference.moe import Scoring, choice_scores

__all__ = ["Permutation", "Scoring", "balance_grad", "choice_scores", "choose", "expert_counts", "permute", "route"]
__all__ += ["route_backward"]

ELEMENTS = 2048  # logits of a program


def choose(logits_TE: Tensor, active: int) -> Tensor:
    """The `active` experts with the largest logits, int32 [T, X], the largest first; of equal ones the lower number.

    They are also those with the largest probabilities.
    """
    if not fused(logits_TE):
        return reference.choose(logits_TE, active)
    return choose_triton(logits_TE, active)


def route(logits_TE: Tensor, choice_TX: Tensor, scoring: Scoring) -> Tensor:
    """The weights [T, X] of the chosen experts: a softmax in float32, rounded to the type of the logits.

    It goes over the chosen (GPT-OSS; Qwen3-MoE with `norm_topk_prob`, as the softmax over all, divided by its sum
    over the chosen, is the same) or over all experts (Qwen3-MoE without). Or sigmoids (GLM, MiniMax), not rounded.
    """
    if not fused(logits_TE):
        return reference.route(logits_TE, choice_TX, scoring)
    return route_triton(logits_TE, choice_TX, scoring)


def route_backward(
    dweights_TX: Tensor,
    logits_TE: Tensor,
    choice_TX: Tensor,
    scoring: Scoring,
    dprobs_E: Tensor | None = None,
    counted_T: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits, like them; `dweights_TX` may be wider than they are.

    `dprobs_E`, from `balance_grad`, is the gradient of the probabilities of each token, or of each `counted_T` one.
    """
    if not fused(logits_TE):
        return reference.route_backward(dweights_TX, logits_TE, choice_TX, scoring, dprobs_E, counted_T)
    return route_backward_triton(dweights_TX, logits_TE, choice_TX, scoring, dprobs_E, counted_T)


class Permutation(NamedTuple):
    """The N = T * X routed rows sorted by expert; row t * X + x is that of token t and its expert x."""

    order: Tensor  # int32 [N]: the routed row at each place; its token is order // X
    places: Tensor  # int32 [T, X]: the place of each routed row
    ends: Tensor  # int32 [E]: where the rows of each expert end


def permute(choice_TX: Tensor, experts: int) -> Permutation:
    """Rows of one expert keep the order of their tokens. At most 32,767 experts."""
    by_expert, order = choice_TX.flatten().to(torch.int16).sort(stable=True)  # 16 bits: half the passes of 32
    ends = _ends(by_expert, experts)
    if not (HAS_TRITON and choice_TX.is_cuda):
        return Permutation(order.int(), reference.invert(order).view_as(choice_TX), ends)
    return Permutation(*invert_triton(order, choice_TX.shape), ends)


def expert_counts(choice_TX: Tensor, experts: int, counted_T: Tensor | None = None) -> Tensor:
    """How often each expert was chosen, by all tokens or the counted ones: float32 [E]."""
    keys = choice_TX if counted_T is None else torch.where(counted_T[:, None], choice_TX, experts)
    ends = _ends(keys.flatten().to(torch.int16).sort().values, experts)
    return torch.diff(ends, prepend=ends.new_zeros(1)).float()


def balance_grad(counts_E: Tensor, rows: int | Tensor, scale: float) -> Tensor:
    """The gradient [E] of `scale` times the load-balancing loss by the probabilities of every counted token.

    That loss (arXiv 2101.03961, equations 4 to 6) is E times the sum over experts of counts / rows and of the mean
    probability. It may be of several layers: then counts are added, and `rows` is tokens times layers.
    """
    return counts_E * (scale * counts_E.numel() / rows) / rows


def _ends(sorted_N: Tensor, experts: int) -> Tensor:
    numbers = torch.arange(experts, dtype=sorted_N.dtype, device=sorted_N.device)
    return torch.searchsorted(sorted_N, numbers, right=True, out_int32=True)


def choose_triton(logits_TE: Tensor, active: int) -> Tensor:
    choice = torch.empty(logits_TE.shape[0], active, dtype=torch.int32, device=logits_TE.device)
    grid, sizes = _launch(logits_TE, active)
    _choose_kernel[grid](logits_TE.contiguous(), choice, *logits_TE.shape, **sizes)
    return choice


def route_triton(logits_TE: Tensor, choice_TX: Tensor, scoring: Scoring) -> Tensor:
    dtype = wide(logits_TE.dtype) if scoring.sigmoid else logits_TE.dtype
    weights = torch.empty_like(choice_TX, dtype=dtype)
    grid, sizes = _launch(logits_TE, choice_TX.shape[1])
    _route_kernel[grid](
        logits_TE.contiguous(), choice_TX, weights, scoring.scale, *logits_TE.shape,
        OVER_CHOSEN=scoring.over_chosen, SIGMOID=scoring.sigmoid, **sizes,
    )  # fmt: skip
    return weights


def route_backward_triton(
    dweights_TX: Tensor,
    logits_TE: Tensor,
    choice_TX: Tensor,
    scoring: Scoring,
    dprobs_E: Tensor | None = None,
    counted_T: Tensor | None = None,
) -> Tensor:
    dlogits = torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
    grid, sizes = _launch(logits_TE, choice_TX.shape[1])
    _route_backward_kernel[grid](
        dweights_TX, logits_TE.contiguous(), choice_TX, dprobs_E, counted_T, dlogits, scoring.scale, *logits_TE.shape,
        OVER_CHOSEN=scoring.over_chosen, SIGMOID=scoring.sigmoid, BALANCE=dprobs_E is not None,
        COUNTED=counted_T is not None, **sizes,
    )  # fmt: skip
    return dlogits


def invert_triton(order_N: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The order as int32, and its inverse, of shape [T, X]."""
    order = torch.empty_like(order_N, dtype=torch.int32)
    places = torch.empty(shape, dtype=torch.int32, device=order_N.device)
    _invert_kernel[(triton.cdiv(order.numel(), 1024),)](order_N, order, places, order.numel(), BLOCK=1024)
    return order, places


def _launch(logits_TE: Tensor, active: int) -> tuple[tuple[int], dict[str, Any]]:
    tokens, experts = logits_TE.shape
    width = power_of_2(experts)
    rows = max(ELEMENTS // width, 1)
    sizes = {"ACTIVE": active, "ROWS": rows, "WIDTH": width, "PLACES": power_of_2(active)}
    return (triton.cdiv(tokens, rows),), sizes | {"num_warps": warps(rows * width)}


@jit
def _load_logits(logits, tokens, experts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The program's tokens, the experts' numbers, and logits [ROWS, WIDTH], -inf beyond the last expert."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = (rows < tokens)[:, None] & (columns < experts)[None, :]
    values = tl.load(logits + rows[:, None] * experts + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return rows, columns, tl.where((columns < experts)[None, :], values, float("-inf"))


@jit
def _choose_kernel(
    logits, choice, tokens, experts,
    ACTIVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    rows, columns, values = _load_logits(logits, tokens, experts, ROWS, WIDTH)
    lowest = -3.4e38  # below it are only experts that are no longer, or never were, to be had
    usable = tl.where(values > lowest, values, lowest)  # NaN also
    values = tl.where((columns < experts)[None, :], usable, float("-inf"))
    for place in range(ACTIVE):
        best = tl.argmax(values, 1, tie_break_left=True)
        tl.store(choice + rows * ACTIVE + place, best.to(tl.int32), mask=rows < tokens)
        values = tl.where(columns[None, :] == best[:, None], float("-inf"), values)


@jit
def _chosen(logits, choice, rows, tokens, experts, ACTIVE: tl.constexpr, PLACES: tl.constexpr):
    """Where each chosen expert of the rows stands in [T, X], whether there is one, and its logit, -inf if not."""
    places = tl.arange(0, PLACES)
    mask = (rows < tokens)[:, None] & (places < ACTIVE)[None, :]
    at = rows[:, None] * ACTIVE + places[None, :]
    expert = tl.load(choice + at, mask=mask, other=0)
    values = tl.load(logits + rows[:, None] * experts + expert, mask=mask, other=0.0).to(tl.float32)
    return at, mask, tl.where((places < ACTIVE)[None, :], values, float("-inf"))


@jit
def _sigmoids(chosen, OVER_CHOSEN: tl.constexpr):
    """The sigmoids of the chosen logits, and what they are divided by; 0 where there is none."""
    small = tl.exp(-tl.abs(chosen))
    scores = tl.where(chosen >= 0, 1.0, small) / (1 + small)
    total = tl.sum(scores, 1)[:, None] + 1e-20 if OVER_CHOSEN else 1.0
    return scores, total


@jit
def _route_kernel(
    logits, choice, weights, scale, tokens, experts,
    OVER_CHOSEN: tl.constexpr, SIGMOID: tl.constexpr,
    ACTIVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    rows, _, values = _load_logits(logits, tokens, experts, ROWS, WIDTH)
    at, mask, chosen = _chosen(logits, choice, rows, tokens, experts, ACTIVE, PLACES)
    if SIGMOID:
        scores, total = _sigmoids(chosen, OVER_CHOSEN)
        result = scores / total * scale
    else:
        if OVER_CHOSEN:
            values = chosen
        top = tl.max(values, 1)[:, None]
        result = tl.exp(chosen - top) / tl.sum(tl.exp(values - top), 1)[:, None]
    tl.store(weights + at, result.to(weights.dtype.element_ty), mask=mask)


@jit
def _route_backward_kernel(
    dweights, logits, choice, dprobs, counted, dlogits, scale, tokens, experts,
    OVER_CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, BALANCE: tl.constexpr, COUNTED: tl.constexpr,
    ACTIVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    rows, columns, values = _load_logits(logits, tokens, experts, ROWS, WIDTH)
    at, mask, chosen = _chosen(logits, choice, rows, tokens, experts, ACTIVE, PLACES)
    exps = tl.exp(values - tl.max(values, 1)[:, None])
    total = tl.sum(exps, 1)[:, None]
    probs = exps / total
    grads = tl.load(dweights + at, mask=mask, other=0.0).to(tl.float32)
    inner = 0.0
    if SIGMOID:
        scores, divisor = _sigmoids(chosen, OVER_CHOSEN)
        if OVER_CHOSEN:
            grads -= tl.sum(scores / divisor * grads, 1)[:, None]
        grads = grads / divisor * scale * scores * (1 - scores)
    elif OVER_CHOSEN:
        exps_chosen = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        weights = exps_chosen / tl.sum(exps_chosen, 1)[:, None]
        grads = weights * (grads - tl.sum(weights * grads, 1)[:, None])
    else:
        inner = tl.sum(tl.exp(chosen - tl.max(values, 1)[:, None]) / total * grads, 1)[:, None]
    spread = tl.zeros((ROWS, WIDTH), tl.float32)
    for place in range(ACTIVE):
        expert = tl.load(choice + rows * ACTIVE + place, mask=rows < tokens, other=0)
        grad = tl.sum(tl.where(tl.arange(0, PLACES)[None, :] == place, grads, 0.0), 1)
        spread = tl.where(columns[None, :] == expert[:, None], grad[:, None], spread)
    if not (OVER_CHOSEN or SIGMOID):
        spread = probs * (spread - inner)
    if BALANCE:
        by_expert = tl.load(dprobs + columns, mask=columns < experts, other=0.0).to(tl.float32)[None, :]
        balance = probs * (by_expert - tl.sum(probs * by_expert, 1)[:, None])
        if COUNTED:
            keep = tl.load(counted + rows, mask=rows < tokens, other=0)
            balance = tl.where((keep != 0)[:, None], balance, 0.0)
        spread += balance
    inside = (rows < tokens)[:, None] & (columns < experts)[None, :]
    tl.store(dlogits + rows[:, None] * experts + columns[None, :], spread.to(dlogits.dtype.element_ty), mask=inside)


@jit
def _invert_kernel(order, order_32, places, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(order + at, mask=at < numel, other=0)
    tl.store(order_32 + at, row.to(tl.int32), mask=at < numel)
    tl.store(places + row, at, mask=at < numel)
