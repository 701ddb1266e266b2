"""The routers' auxiliary loss, which balances the load of experts (Fedus et al. 2021, arXiv 2101.03961).

For each layer with experts and each micro-batch, it is E times the sum over experts of the fraction of tokens routed to
the expert times its mean probability (equations 4 to 6). The experts with the largest logits count as those that a
token is routed to, even if correction biases change the choice. The objective includes `router_aux_loss_coef` times the
mean over layers and micro-batches. transformers computes fractions and probabilities over all layers together, which is
the same for one layer; with more, a layer's gradient would depend on layers that the pipeline has not computed yet.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.batch import Balance
from rptrain.models.families.config import read_flag, read_number
from rptrain.models.layers.block import blocks
from rptrain.models.layers.router import Router
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.utils.errors import UserError


def balanced(spec: ModelSpec, coefficient: float | None) -> ModelSpec:
    """The model with this weight of the auxiliary loss; None: the value in config.json, if it enables the loss.

    Raises UserError if the model has no routers.
    """
    routers = _routers(spec)
    if coefficient and not routers:
        raise UserError("train.router_aux_loss_coef needs a model with experts: this model has none")
    if coefficient is None and any(router.balance_in_config for router in routers):
        coefficient = _asked(spec.text_config)
    if not coefficient:
        return spec
    each = coefficient / len(routers)
    layers = (replace(block, feed_forward=block.feed_forward.with_balance(each)) for block in blocks(spec))
    return replace(spec, layers=tuple(layers), router_aux_loss_coef=coefficient)


def _routers(spec: ModelShape) -> list[Router]:
    routers = (block.feed_forward.router for block in blocks(spec))
    return [router for router in routers if router is not None]


def note(spec: ModelShape) -> str:
    """What a plan and the log of a run say about the loss; empty if it is off, or as in transformers."""
    each = [router.balance for router in _routers(spec) if router.balance_in_config]
    if len(each) < 2 or not sum(each):  # transformers has no such loss where config.json cannot enable it
        return ""
    return (
        f"the auxiliary loss of the routers is on (router_aux_loss_coef {sum(each):.4g}): it balances each layer, "
        f"where transformers balances all {len(each)} layers together, so updates differ by about as much as the "
        "loss changes them (docs/guide/scaling.md, Mixture-of-experts models)"
    )


def _asked(config: Mapping[str, Any]) -> float:
    found: list[str] = []
    coefficient = 0.0
    if read_flag(config, "output_router_logits", found) and config.get("router_aux_loss_coef") != 0:
        coefficient = read_number(config, "router_aux_loss_coef", found, 0.001, kind=float)
    if found:
        raise UserError(f"config.json: {'; '.join(found)}")
    return coefficient


def balance_of(labels: Tensor, cu_seqlens: Tensor, scale: Tensor) -> Balance:
    """The Balance of a micro-batch, computed without waiting for the device.

    Documents without a supervised label are padding, because no other such documents are trained on.
    """
    tokens = torch.arange(len(labels), dtype=cu_seqlens.dtype, device=labels.device)
    documents = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    supervised = torch.zeros(len(labels) + 1, dtype=torch.int64, device=labels.device)
    torch.cumsum(labels >= 0, 0, out=supervised[1:])
    counted = supervised[cu_seqlens.long()].diff().index_select(0, documents) > 0
    return Balance(counted, counted.sum().to(scale.dtype).clamp_(min=1), scale)
