"""GLM-4.5 to 4.7: a few dense layers, then a sigmoid router with a correction bias, and a shared expert."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rptrain.kernels.moe import Scoring
from rptrain.models.families import decoder
from rptrain.models.families.config import (
    Sizes,
    read_experts,
    read_flag,
    read_groups,
    read_number,
    read_shape,
    with_defaults,
)
from rptrain.models.families.family import Family
from rptrain.models.layers.attention import Attention
from rptrain.models.layers.mlp import MLP, SharedMLP
from rptrain.models.layers.moe import MoE
from rptrain.models.layers.router import Router
from rptrain.models.params import Unit
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Glm4MoeForCausalLM"
DEFAULTS = {  # for missing keys of config.json
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "norm_topk_prob": True,
}

ALIASES = (("num_local_experts", "n_routed_experts"), ("num_nextn_predict_layers", "num_mtp_layers"))


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, ("partial_rotary_factor",), ALIASES)
    experts, active = read_experts(filled, "n_routed_experts", found)
    groups = read_groups(filled, experts, active, found)
    intermediate = read_number(filled, "moe_intermediate_size", found)
    shared = intermediate * read_number(filled, "n_shared_experts", found, 1)
    dense = read_number(filled, "first_k_dense_replace", found, 1, least=0)
    over_chosen = read_flag(filled, "norm_topk_prob", found)
    scoring = Scoring(over_chosen, True, read_number(filled, "routed_scaling_factor", found, 1.0, float))
    extra = read_number(filled, "num_nextn_predict_layers", found, 1, least=0)
    biases = read_flag(filled, "attention_bias", found)
    qk_norm = read_flag(filled, "use_qk_norm", found)
    shape = read_shape(filled, unsupported=found, biases=biases, partial=True)

    router = Router(experts=experts, active=active, scoring=scoring, groups=groups, wide=True, balance_in_config=False)
    attention = decoder.attention(shape, qk_norm=qk_norm, qkv_bias=biases)
    mlp = MLP.of(shape.hidden, shape.intermediate)
    mixture = MoE.of(shape.hidden, intermediate, router, shared=SharedMLP.of(shape.hidden, shared))
    units, blocks, corrections = [], [], {}
    for index in range(shape.layers):
        if index < dense:
            units.append(decoder.dense_unit(shape, index, attention))
            blocks.append(decoder.block(shape, index, attention, mlp))
            continue
        units.append(_unit(shape, index, attention, mixture))
        key = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
        corrections[index] = decoder.correction_unit(index, key, experts)
        blocks.append(decoder.block(shape, index, attention, mixture))
    spec = decoder.model(ARCHITECTURE, config, shape, units, blocks, extra=corrections)
    return replace(spec, carried=decoder.mtp_layers(shape.layers, extra))


def _unit(sizes: Sizes, index: int, attention: Attention, mixture: MoE) -> Unit:
    at, experts, intermediate = f"model.layers.{index}", mixture.router.experts, mixture.down.inputs
    assert mixture.shared is not None
    params = (
        *decoder.attention_params(sizes, at, attention),
        decoder.post_norm(sizes, at),
        decoder.matrix("router", sizes.hidden, sizes.std, (f"{at}.mlp.gate", experts)),
        *decoder.expert_matrices(sizes, at, intermediate, experts),
        *decoder.shared_expert_params(sizes, mixture.shared, f"{at}.mlp.shared_experts"),
    )
    return Unit(f"layers.{index}", params)


FAMILY = Family(ARCHITECTURE, "glm4_moe", build, has_experts=True)
