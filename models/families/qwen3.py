"""Qwen3, the dense models: Llama's block with a norm on every head's queries and keys; windows as in Qwen2."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.llama import decoder
from rptrain.models.families.qwen2 import windows
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32}  # for missing keys of config.json


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    layer_windows = windows(config, found)
    filled = with_defaults(config, DEFAULTS, found, ("num_key_value_heads",))
    shape = read_shape(filled, unsupported=found)
    return decoder(ARCHITECTURE, config, shape, layer_windows, qk_norm=True)


FAMILY = Family(ARCHITECTURE, "qwen3", build)
