"""Qwen2 and Qwen2.5: Llama's block with biases on queries, keys and values, and windows that are off by default."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import read_flag, read_number, read_shape, read_windows, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.llama import decoder
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Qwen2ForCausalLM"
DEFAULTS = {"num_key_value_heads": 32}  # for missing keys of config.json; null is a value


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    layer_windows = windows(config, found)
    filled = with_defaults(config, DEFAULTS, found, DEFAULTS)
    shape = read_shape(filled, unsupported=found, biases=True)  # config.json does not mention it
    return decoder(ARCHITECTURE, config, shape, layer_windows, qkv_bias=True)


def windows(config: Mapping[str, Any], found: list[str]) -> list[int | None]:
    """The window of each layer's attention in Qwen2 and Qwen3; problems are added to `found`.

    With `use_sliding_window`, layers from `max_window_layers` on have the window.
    """
    layers = read_number(config, "num_hidden_layers", [])  # `read_shape` reports the problem
    window = config.get("sliding_window", 4096) if read_flag(config, "use_sliding_window", found) else None
    if window is None:
        return read_windows(config, None, [False] * layers, found)
    window = read_number(config, "sliding_window", found, 4096)
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        found.append(f"max_window_layers must be a whole number, not {first!r}")
        return []
    return read_windows(config, window, [index >= first for index in range(layers)], found)


FAMILY = Family(ARCHITECTURE, "qwen2", build)
