"""Mistral: Llama's block; attention has one window in all layers, or none."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import read_number, read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.llama import decoder
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "MistralForCausalLM"
DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}  # for missing keys of config.json


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, ("sliding_window",))
    window = read_window(filled, found)
    shape = read_shape(filled, unsupported=found)
    return decoder(ARCHITECTURE, config, shape, [window] * shape.layers)


def read_window(config: Mapping[str, Any], found: list[str]) -> int | None:
    """The window of attention in all layers, None for full attention; problems are added to `found`."""
    window = None if config["sliding_window"] is None else read_number(config, "sliding_window", found)
    same = "full_attention" if window is None else "sliding_attention"
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == same for kind in kinds)):
        value = "null" if window is None else window
        found.append(f"layer_types must be {same} for all layers, because sliding_window is {value}")
    return window


FAMILY = Family(ARCHITECTURE, "mistral", build)
