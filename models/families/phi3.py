"""Phi-3 and Phi-4: Llama's block with fused projections in checkpoints, and optional partial rotary embeddings."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import read_number, read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.llama import decoder
from rptrain.models.layers import rope
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Phi3ForCausalLM"
DEFAULTS = {"rms_norm_eps": 1e-5, "pad_token_id": 32000}  # for missing keys of config.json


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, ("pad_token_id",))
    settings = rope.parameters(filled)
    kind = settings.get("rope_type", "default")
    if kind != "default":  # transformers takes yarn for longrope here
        found.append(f"rope type {kind!r} is not supported in this architecture; default is")
        settings["rope_type"] = "default"
    if filled.get("resid_pdrop"):
        found.append(f"resid_pdrop {filled['resid_pdrop']!r} is not supported; it must be off")
    window = None if filled.get("sliding_window") is None else read_number(filled, "sliding_window", found)
    shape = read_shape(filled, unsupported=found, partial=True, ropes=[settings])
    return decoder(ARCHITECTURE, config, shape, [window] * shape.layers, fused=True)


FAMILY = Family(ARCHITECTURE, "phi3", build)
