"""Ministral 3: Mistral's block, with queries that are scaled by their positions."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.llama import decoder
from rptrain.models.families.mistral import read_window
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Ministral3ForCausalLM"
# Defaults for missing keys of config.json
DEFAULTS: Mapping[str, Any] = {
    "sliding_window": None,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 11,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, ("pad_token_id",))
    window = read_window(filled, found)
    shape = read_shape(filled, unsupported=found, query_scaling=True)
    return decoder(ARCHITECTURE, config, shape, [window] * shape.layers)


FAMILY = Family(ARCHITECTURE, "ministral3", build)
