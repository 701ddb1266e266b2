"""Seed-OSS: Llama's block with biases on queries, keys and values.

The published config.json names dropout rates. Training here has none.
"""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import read_flag, read_shape
from rptrain.models.families.family import Family
from rptrain.models.families.llama import decoder
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "SeedOssForCausalLM"
# Defaults for missing keys of config.json; null is a value.
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "pad_token_id": 1}


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    qkv_bias = read_flag(config, "attention_bias", found, True)
    o_bias = read_flag(config, "attention_out_bias", found)
    filled = {**DEFAULTS, **config, "attention_dropout": 0.0}
    shape = read_shape(filled, unsupported=found, biases=qkv_bias)
    return decoder(ARCHITECTURE, config, shape, qkv_bias=qkv_bias, o_bias=o_bias)


FAMILY = Family(ARCHITECTURE, "seed_oss", build)
