"""SmolLM3: Llama's block; some layers have no rotary positions, and those may have windows."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import read_flag, read_number, read_shape, read_windows, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.llama import decoder
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "SmolLM3ForCausalLM"
DEFAULTS = {  # for missing keys of config.json
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
    "pad_token_id": 128_004,
}


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features.

    `no_rope_layers` has 1 for a layer with rotary positions, and 0 for one without.
    """
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, ("num_key_value_heads", "pad_token_id"))
    layers = read_number(filled, "num_hidden_layers", [])  # `read_shape` reports the problem
    rotates = _rotating(filled, layers, found)
    has_windows = read_flag(filled, "use_sliding_window", found) and filled.get("sliding_window") is not None
    window = read_number(filled, "sliding_window", found) if has_windows else None
    windows = read_windows(filled, window, [has_windows and not rotating for rotating in rotates], found)
    biases = read_flag(filled, "attention_bias", found)
    shape = read_shape(filled, unsupported=found, biases=biases)
    rotaries = [0 if rotating else None for rotating in rotates]
    return decoder(ARCHITECTURE, config, shape, windows, rotaries, qkv_bias=biases, o_bias=biases)


def _rotating(config: Mapping[str, Any], layers: int, found: list[str]) -> list[bool]:
    """The layers that have rotary positions; problems are added to `found`."""
    stored = config.get("no_rope_layers")
    if stored is None:
        every = read_number(config, "no_rope_layer_interval", found, 4)
        return [(index + 1) % every != 0 for index in range(layers)]
    if not isinstance(stored, list) or len(stored) < layers or any(value not in (0, 1) for value in stored):
        found.append(f"no_rope_layers must be a list of 0 or 1 for each of {layers} layers, not {stored!r}")
        return [True] * layers
    return [bool(value) for value in stored[:layers]]


FAMILY = Family(ARCHITECTURE, "smollm3", build)
