"""MiniMax-M2: a sigmoid router with a correction bias, norms over all heads, and partial rotary embeddings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rptrain.kernels.moe import Scoring
from rptrain.models.families import decoder
from rptrain.models.families.config import Sizes, read_experts, read_number, read_only, read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.layers.attention import Attention
from rptrain.models.layers.moe import MoE
from rptrain.models.layers.router import Router
from rptrain.models.params import Unit
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "MiniMaxM2ForCausalLM"
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5_000_000.0}  # for missing keys of config.json
ALIASES = (("num_experts", "num_local_experts"),)
ONLY = {  # settings of published files, which transformers does not read, and their only supported values
    "scoring_func": "sigmoid",
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
KINDS = ("w1", "w3", "w2")  # gate, up and down of an expert


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, aliases=ALIASES)
    read_only(filled, ONLY, found)
    experts, active = read_experts(filled, "num_local_experts", found)
    if filled.get("router_jitter_noise"):
        found.append(f"router_jitter_noise {filled['router_jitter_noise']!r} is not supported; it must be off")
    if filled.get("rotary_dim") is not None and "partial_rotary_factor" not in filled:
        size = read_number(filled, "head_dim", [])  # `read_shape` reports the problem
        filled["partial_rotary_factor"] = read_number(filled, "rotary_dim", found) / size
    kinds = filled.get("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == 1 for kind in kinds)):
        found.append("attn_type_list must be a list of 1 for each layer: linear attention is not supported")
    extra = read_number(filled, "num_mtp_modules", found, 0, least=0)
    shape = read_shape(filled, unsupported=found, partial=True)

    router = Router(experts=experts, active=active, scoring=Scoring(over_chosen=True, sigmoid=True))
    attention = decoder.attention(shape, qk_norm=True, whole_qk_norm=True)
    mixture = MoE.of(shape.hidden, shape.intermediate, router)
    layers = range(shape.layers)
    spec = decoder.model(
        ARCHITECTURE,
        config,
        shape,
        [_unit(shape, index, attention, experts) for index in layers],
        [decoder.block(shape, index, attention, mixture) for index in layers],
        extra={
            index: decoder.correction_unit(index, f"{_mixture(index)}.e_score_correction_bias", experts)
            for index in layers
        },
    )
    return replace(spec, carried=decoder.mtp_layers(shape.layers, extra))


def _mixture(index: int) -> str:
    """The mixture of experts of a layer in checkpoints."""
    return f"model.layers.{index}.block_sparse_moe"


def _unit(sizes: Sizes, index: int, attention: Attention, experts: int) -> Unit:
    at = f"model.layers.{index}"
    params = (
        *decoder.attention_params(sizes, at, attention),
        decoder.post_norm(sizes, at),
        decoder.matrix("router", sizes.hidden, sizes.std, (f"{_mixture(index)}.gate", experts)),
        *decoder.expert_matrices(sizes, at, sizes.intermediate, experts, "block_sparse_moe.experts", KINDS),
    )
    return Unit(f"layers.{index}", params)


FAMILY = Family(ARCHITECTURE, "minimax_m2", build, has_experts=True)
