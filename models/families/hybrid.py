"""Hybrid decoders, which Qwen3.5 and Qwen3-Next share: blocks of gated delta nets, and some of gated attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rptrain.kernels.causal_conv import MIN_WIDTH
from rptrain.kernels.moe import Scoring
from rptrain.models.families import decoder
from rptrain.models.families.config import Shape, Sizes, read_experts, read_layer_types, read_number
from rptrain.models.layers.block import FeedForward
from rptrain.models.layers.delta_net import DeltaNet
from rptrain.models.layers.mlp import SharedMLP
from rptrain.models.layers.moe import MoE
from rptrain.models.layers.norms import Norms
from rptrain.models.layers.router import Router
from rptrain.models.params import CheckpointPart, Param, Unit
from rptrain.models.spec import ModelSpec

LINEAR, FULL = KINDS = ("linear_attention", "full_attention")  # of layer_types
# Defaults for missing keys of config.json
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
NULLABLE = ("partial_rotary_factor",)
# Settings that transformers does not read, and their only supported values
ONLY: Mapping[str, Any] = {"attn_output_gate": True, "output_gate_type": "swish"}
A_RANGE = (0.01, 16.0)  # of exp(a_log) before training
CARRIED = ("mtp.*",)  # the layer for multi-token prediction (MTP)


class DeltaSizes(NamedTuple):
    """The sizes of delta nets, as in `DeltaNet`."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int


class Mixers(NamedTuple):
    """The mixers of a decoder."""

    kinds: Sequence[str]  # of each layer
    delta: DeltaSizes


class Experts(NamedTuple):
    """The sizes of a mixture of experts."""

    experts: int
    active: int
    intermediate: int
    shared: int  # the columns of the shared one


def read_mixers(config: Mapping[str, Any], found: list[str]) -> Mixers:
    """The mixers of a config with `DEFAULTS`; problems are added to `found`."""
    layers = read_number(config, "num_hidden_layers", [])  # `read_shape` reports the problem
    interval = read_number(config, "full_attention_interval", found)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    kinds = read_layer_types(config, KINDS, default, found)
    before = len(found)
    delta = DeltaSizes(
        key_heads=read_number(config, "linear_num_key_heads", found),
        value_heads=read_number(config, "linear_num_value_heads", found),
        key_size=read_number(config, "linear_key_head_dim", found),
        value_size=read_number(config, "linear_value_head_dim", found),
        width=read_number(config, "linear_conv_kernel_dim", found),
    )
    sound = len(found) == before  # placeholders of wrong values are not looked at
    if sound and delta.value_heads % delta.key_heads:
        found.append(
            f"linear_num_value_heads {delta.value_heads} is not a multiple of linear_num_key_heads {delta.key_heads}"
        )
    if sound and delta.width < MIN_WIDTH:
        found.append(f"linear_conv_kernel_dim is at least {MIN_WIDTH}, not {delta.width}")
    return Mixers(kinds, delta)


def read_mixture(config: Mapping[str, Any], found: list[str]) -> Experts:
    """The experts of a config; problems are added to `found`."""
    return Experts(
        *read_experts(config, "num_experts", found),
        intermediate=read_number(config, "moe_intermediate_size", found),
        shared=read_number(config, "shared_expert_intermediate_size", found),
    )


def mixture(sizes: Sizes, experts: Experts, scoring: Scoring) -> MoE:
    """Experts, and a shared one whose output is multiplied by a gate."""
    router = Router(experts=experts.experts, active=experts.active, scoring=scoring)
    shared = SharedMLP.of(sizes.hidden, experts.shared, gated=True)
    return MoE.of(sizes.hidden, experts.intermediate, router, shared=shared)


def mixture_params(sizes: Sizes, index: int, mixture: MoE) -> list[Param]:
    """The parameters of the experts of a layer."""
    at, experts = f"model.layers.{index}", mixture.router.experts
    assert mixture.shared is not None
    return [
        decoder.matrix("router", sizes.hidden, sizes.std, (f"{at}.mlp.gate", experts)),
        *decoder.expert_matrices(sizes, at, mixture.down.inputs, experts),
        *decoder.shared_expert_params(sizes, mixture.shared, f"{at}.mlp.shared_expert"),
    ]


def model(
    architecture: str,
    config: Mapping[str, Any],
    shape: Shape,
    mixers: Mixers,
    feed_forward: Callable[[int], tuple[FeedForward, Sequence[Param]]],
    *,
    fused: bool = False,
) -> ModelSpec:
    """The decoder. `feed_forward` has the part of each layer, and its parameters.

    `fused`: checkpoints have one tensor of queries, keys, values and z, and one of b and a, both by key head.
    """
    norms = Norms(shape.eps, zero_centered=True)
    attention = decoder.attention(shape, qk_norm=True, gated=True, zero_centered=True)
    delta_net = DeltaNet.of(shape.hidden, *mixers.delta, eps=shape.eps, by_key_head=fused)
    units, blocks, decays = [], [], {}
    for index, kind in enumerate(mixers.kinds):
        at = f"model.layers.{index}"
        if kind == FULL:
            mixer, mixing = attention, decoder.attention_params(shape, at, attention, norms)
        else:
            input_norm = decoder.input_norm(shape, at, zero_centered=True)
            mixer, mixing = delta_net, [input_norm, *_delta_params(shape, at, delta_net, fused=fused)]
            decays[index] = _decay_unit(index, at, delta_net)
        part, params = feed_forward(index)
        units.append(Unit(f"layers.{index}", (*mixing, decoder.post_norm(shape, at, zero_centered=True), *params)))
        blocks.append(decoder.block(shape, index, mixer, part, norms=norms))
    spec = decoder.model(architecture, config, shape, units, blocks, extra=decays, zero_centered=True)
    return replace(spec, carried=CARRIED)


def _delta_params(sizes: Sizes, at: str, mixer: DeltaNet, *, fused: bool) -> list[Param]:
    """The parameters of a delta net, without those of its decay."""
    module, hidden, heads = f"{at}.linear_attn", sizes.hidden, mixer.value_heads
    values = heads * mixer.value_size
    channels = 2 * mixer.key_heads * mixer.key_size + values
    qkvz = ((f"{module}.in_proj_qkv", channels), (f"{module}.in_proj_z", values))
    ba = ((f"{module}.in_proj_b", heads), (f"{module}.in_proj_a", heads))
    if fused:
        qkvz, ba = ((f"{module}.in_proj_qkvz", channels + values),), ((f"{module}.in_proj_ba", 2 * heads),)
    taps = (CheckpointPart(f"{module}.conv1d.weight", channels),)
    return [
        decoder.matrix("delta_qkvz", hidden, sizes.std, *qkvz),
        decoder.matrix("delta_ba", hidden, sizes.std, *ba),
        Param("delta_conv", (channels, 1, mixer.width), taps, std=sizes.std),
        decoder.norm("delta_norm", f"{module}.norm", mixer.value_size),
        decoder.matrix("delta_out", values, sizes.std, (f"{module}.out_proj", hidden)),
    ]


def _decay_unit(index: int, at: str, mixer: DeltaNet) -> Unit:
    """The parameters of a delta net's decay. They are trained in float32, because they lie in exponents."""

    def vector(name: str, stored: str, **options: Any) -> Param:
        parts = (CheckpointPart(f"{at}.linear_attn.{stored}", mixer.value_heads),)
        return Param(name, (mixer.value_heads,), parts, decay=False, dtype=torch.float32, **options)

    a_log = vector("a_log", "A_log", log_uniform=A_RANGE)
    return Unit(f"layers.{index}.decay", (a_log, vector("dt_bias", "dt_bias", std=None)))
