"""Qwen3.5 and Qwen3.6 with experts: hybrid decoders with a mixture of experts in each layer, and a gated shared one."""

from collections.abc import Mapping
from typing import Any

from rptrain.kernels.moe import Scoring
from rptrain.models.families import hybrid, qwen3_5
from rptrain.models.families.config import read_only, read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
DEFAULTS = {**hybrid.DEFAULTS, "num_key_value_heads": 2}  # for missing keys of config.json
ONLY = {**hybrid.ONLY, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, hybrid.NULLABLE)
    read_only(filled, ONLY, found)
    mixers, experts = hybrid.read_mixers(filled, found), hybrid.read_mixture(filled, found)
    filled["intermediate_size"] = experts.intermediate  # the decoder has no other MLP
    shape = read_shape(filled, unsupported=found, partial=True)
    mixture = hybrid.mixture(shape, experts, Scoring(over_chosen=True))
    spec = hybrid.model(
        ARCHITECTURE, config, shape, mixers, lambda index: (mixture, hybrid.mixture_params(shape, index, mixture))
    )
    return qwen3_5.alone(spec)


FAMILY = Family(ARCHITECTURE, "qwen3_5_moe_text", build, has_experts=True, mlp_modules=True)
TOWER = qwen3_5.tower("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
