"""Mixtures of experts in plain PyTorch: the reference of kernels/moe.py, moe_rows.py and grouped.py.

Suffixes: T tokens, E experts, X experts of a token, N = T * X routed rows, sorted by expert; K and M inner and outer
size of a product.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.reference.dense import wide

TINY = 1e-20  # added to sums of sigmoids, as in GLM; also in kernels/moe.py


class Scoring(NamedTuple):
    """How the weights of a token's experts follow from its logits."""

    over_chosen: bool  # whether the weights are divided by their sum over the chosen experts
    sigmoid: bool = False  # of each logit, in place of the softmax over all
    scale: float = 1.0  # factor of the weights of sigmoids


def choose(logits_TE: Tensor, active: int) -> Tensor:
    """The `active` experts with the largest logits, int32 [T, X], the largest first; of equal ones the lower number."""
    usable = logits_TE.nan_to_num(nan=float("-inf"))
    return usable.sort(dim=1, descending=True, stable=True).indices[:, :active].int()


def choice_scores(logits_TE: Tensor, correction_E: Tensor, groups: int, kept: int) -> Tensor:
    """Sigmoids plus the correction, [T, E] in the wide type; -inf in all but `kept` of the groups of experts.

    They are the groups with the largest sums of their two largest scores.
    """
    scores = logits_TE.to(wide(logits_TE.dtype)).sigmoid() + correction_E
    if groups == kept:
        return scores
    grouped = scores.unflatten(1, (groups, -1))
    best = choose(grouped.topk(2, dim=2).values.sum(2), kept).long()
    dropped = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)


def route(logits_TE: Tensor, choice_TX: Tensor, scoring: Scoring) -> Tensor:
    """The weights at the chosen: [T, X] like the logits; of sigmoids in the wide type."""
    if scoring.sigmoid:
        return _sigmoids(logits_TE, choice_TX, scoring)[1]
    return _probabilities(logits_TE, choice_TX, scoring)[0].to(logits_TE.dtype)


def route_backward(
    dweights_TX: Tensor,
    logits_TE: Tensor,
    choice_TX: Tensor,
    scoring: Scoring,
    dprobs_E: Tensor | None = None,
    counted_T: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits; `dprobs_E` is that of each counted token's softmax over all experts."""
    weights, probs = _probabilities(logits_TE, choice_TX, scoring)
    dweights, place = dweights_TX.to(probs.dtype), choice_TX.long()
    inner = (weights * dweights).sum(1, keepdim=True)
    if scoring.sigmoid:
        scores, weights, total = _sigmoids(logits_TE, choice_TX, scoring)
        inner = (weights * dweights).sum(1, keepdim=True) / scoring.scale if scoring.over_chosen else 0
        dscores = (dweights - inner) / total * scoring.scale
        dlogits = torch.zeros_like(probs).scatter_(1, place, dscores * scores * (1 - scores))
    elif scoring.over_chosen:
        dlogits = torch.zeros_like(probs).scatter_(1, place, weights * (dweights - inner))
    else:
        dlogits = probs * (torch.zeros_like(probs).scatter_(1, place, dweights) - inner)
    if dprobs_E is not None:
        balance = probs * (dprobs_E - (probs * dprobs_E).sum(1, keepdim=True))
        dlogits += balance if counted_T is None else balance * counted_T[:, None]
    return dlogits.to(logits_TE.dtype)


def _probabilities(logits_TE: Tensor, choice_TX: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    logits = logits_TE.to(wide(logits_TE.dtype))
    probs = logits.softmax(1)
    place = choice_TX.long()
    return logits.gather(1, place).softmax(1) if scoring.over_chosen else probs.gather(1, place), probs


def _sigmoids(logits_TE: Tensor, choice_TX: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor | float]:
    """The sigmoids of the chosen, the weights, and what the sigmoids were divided by."""
    scores = logits_TE.gather(1, choice_TX.long()).to(wide(logits_TE.dtype)).sigmoid()
    total = scores.sum(1, keepdim=True) + TINY if scoring.over_chosen else 1.0
    return scores, scores / total * scoring.scale, total


def invert(order_N: Tensor) -> Tensor:
    """int32 [N]: where each routed row lies, given which one lies at each place."""
    places = torch.empty_like(order_N, dtype=torch.int32)
    places[order_N.long()] = torch.arange(order_N.numel(), dtype=torch.int32, device=order_N.device)
    return places


def gather(x_TD: Tensor, order_N: Tensor, active: int) -> Tensor:
    """The tokens' rows by expert: [N, D]."""
    return x_TD[order_N.long() // active]


def combine(rows_ND: Tensor, places_TX: Tensor, weights_TX: Tensor | None) -> Tensor:
    """The sum of each token's rows, weighted or not: [T, D], rounded once."""
    dtype = wide(rows_ND.dtype)
    places = places_TX.long()
    total = torch.zeros(len(places), rows_ND.shape[1], dtype=dtype, device=rows_ND.device)
    for number in range(places.shape[1]):
        rows = rows_ND[places[:, number]]
        total = total + (rows if weights_TX is None else rows * weights_TX[:, number, None].to(dtype))
    return total.to(rows_ND.dtype)


def weigh(drows_ND: Tensor, rows_ND: Tensor, weights_TX: Tensor, order_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both arguments times the weights, and the weights' gradient [T, X] in the wide type: products of rows."""
    dtype = wide(rows_ND.dtype)
    order = order_N.long()
    weights = weights_TX.to(dtype).flatten()[order, None]
    dweights = torch.empty_like(weights_TX, dtype=dtype)
    dweights.view(-1)[order] = (drows_ND.to(dtype) * rows_ND).sum(1)
    return (drows_ND * weights).to(drows_ND.dtype), (rows_ND * weights).to(rows_ND.dtype), dweights


def grouped_mm(x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor, bias_EM: Tensor | None) -> Tensor:
    """Rows up to ends_E[e] (from those of the expert before) times w_EKM[e], plus bias_EM[e]: [N, M]."""
    out = x_NK.new_empty(x_NK.shape[0], w_EKM.shape[2])
    for expert, rows in groups(ends_E):
        product = x_NK[rows] @ w_EKM[expert]
        out[rows] = product if bias_EM is None else product + bias_EM[expert]
    return out


def grouped_mm_add(x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor, y_NM: Tensor) -> None:
    for expert, rows in groups(ends_E):
        y_NM[rows].addmm_(x_NK[rows], w_EKM[expert])


def grouped_weight_grad(acc_EKM: Tensor, x_NK: Tensor, dy_NM: Tensor, ends_E: Tensor) -> None:
    for expert, rows in groups(ends_E):
        acc_EKM[expert].addmm_(x_NK[rows].to(acc_EKM.dtype).T, dy_NM[rows].to(acc_EKM.dtype))


def grouped_bias_grad(acc_EM: Tensor, dy_NM: Tensor, ends_E: Tensor) -> None:
    for expert, rows in groups(ends_E):
        acc_EM[expert] += dy_NM[rows].to(acc_EM.dtype).sum(0)


def groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """Experts that have rows, and which."""
    ends = ends_E.tolist()
    pairs = zip([0, *ends[:-1]], ends, strict=True)
    return [(expert, slice(begin, end)) for expert, (begin, end) in enumerate(pairs) if begin < end]
