"""Qwen3-Next: a hybrid decoder with a mixture of experts; its delta nets have two fused input projections."""

from collections.abc import Mapping, Sequence
from typing import Any

from rptrain.kernels.moe import Scoring
from rptrain.models.families import decoder, hybrid
from rptrain.models.families.config import read_flag, read_only, read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.qwen3_moe import read_dense
from rptrain.models.layers.block import FeedForward
from rptrain.models.layers.mlp import MLP
from rptrain.models.params import Param
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Qwen3NextForCausalLM"
DEFAULTS = {**hybrid.DEFAULTS, "num_key_value_heads": 2}  # for missing keys of config.json


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, hybrid.NULLABLE)
    read_only(filled, hybrid.ONLY, found)
    mixers, experts = hybrid.read_mixers(filled, found), hybrid.read_mixture(filled, found)
    dense = read_dense(filled, found)
    scoring = Scoring(over_chosen=read_flag(filled, "norm_topk_prob", found, True))
    shape = read_shape(filled, unsupported=found, partial=True)
    mixture, mlp = hybrid.mixture(shape, experts, scoring), MLP.of(shape.hidden, shape.intermediate)

    def feed_forward(index: int) -> tuple[FeedForward, Sequence[Param]]:
        if dense[index]:
            return mlp, decoder.mlp_params(shape, f"model.layers.{index}")
        return mixture, hybrid.mixture_params(shape, index, mixture)

    return hybrid.model(ARCHITECTURE, config, shape, mixers, feed_forward, fused=True)


FAMILY = Family(ARCHITECTURE, "qwen3_next", build, has_experts=True)
