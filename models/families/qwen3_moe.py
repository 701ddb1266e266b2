"""Qwen3-MoE: Qwen3's attention with a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from rptrain.kernels.moe import Scoring
from rptrain.models.families import decoder
from rptrain.models.families.config import Sizes, read_experts, read_flag, read_number, read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.layers.attention import Attention
from rptrain.models.layers.mlp import MLP
from rptrain.models.layers.moe import MoE
from rptrain.models.layers.router import Router
from rptrain.models.params import Unit
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Qwen3MoeForCausalLM"
DEFAULTS = {"num_key_value_heads": 4}  # for missing keys of config.json
ALIASES = (("num_local_experts", "num_experts"),)


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features.

    Layers without experts (`mlp_only_layers`, `decoder_sparse_step`) are Qwen3 blocks.
    """
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, aliases=ALIASES)
    experts, active = read_experts(filled, "num_experts", found)
    intermediate = read_number(filled, "moe_intermediate_size", found)
    dense = read_dense(filled, found)
    scoring = Scoring(over_chosen=read_flag(filled, "norm_topk_prob", found))
    if read_flag(filled, "use_sliding_window", found) and filled.get("sliding_window", 4096):
        found.append("layers with sliding-window attention are not supported")
    shape = read_shape(filled, unsupported=found)

    router = Router(experts=experts, active=active, scoring=scoring)
    attention, mlp = decoder.attention(shape, qk_norm=True), MLP.of(shape.hidden, shape.intermediate)
    mixture = MoE.of(shape.hidden, intermediate, router)
    units, blocks = [], []
    for index in range(shape.layers):
        if dense[index]:
            units.append(decoder.dense_unit(shape, index, attention))
            blocks.append(decoder.block(shape, index, attention, mlp))
            continue
        units.append(_unit(shape, index, attention, mixture))
        blocks.append(decoder.block(shape, index, attention, mixture))
    return decoder.model(ARCHITECTURE, config, shape, units, blocks)


def read_dense(config: Mapping[str, Any], found: list[str]) -> list[bool]:
    """Whether each layer has an MLP in place of experts; problems are added to `found`."""
    step = read_number(config, "decoder_sparse_step", found, 1)
    dense = config.get("mlp_only_layers") or []
    layers = read_number(config, "num_hidden_layers", [])  # `read_shape` reports the problem
    if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < layers for index in dense):
        found.append(f"mlp_only_layers must be a list of layers' numbers, from 0 to {layers - 1}, not {dense!r}")
        return []
    return [index in dense or bool((index + 1) % step) for index in range(layers)]


def _unit(sizes: Sizes, index: int, attention: Attention, mixture: MoE) -> Unit:
    at, experts, intermediate = f"model.layers.{index}", mixture.router.experts, mixture.down.inputs
    params = (
        *decoder.attention_params(sizes, at, attention),
        decoder.post_norm(sizes, at),
        decoder.matrix("router", sizes.hidden, sizes.std, (f"{at}.mlp.gate", experts)),
        *decoder.expert_matrices(sizes, at, intermediate, experts),
    )
    return Unit(f"layers.{index}", params)


FAMILY = Family(ARCHITECTURE, "qwen3_moe", build, has_experts=True)
