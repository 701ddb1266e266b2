"""Qwen3.5, Qwen3.6 and Qwen3.8, the dense models: hybrid decoders, which are published with a vision tower."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rptrain.models.families import decoder, hybrid
from rptrain.models.families.config import read_only, read_shape, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.text_tower import TextTower
from rptrain.models.layers.mlp import MLP
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Qwen3_5ForCausalLM"
DEFAULTS = {**hybrid.DEFAULTS, "num_key_value_heads": 4}  # for missing keys of config.json
ALONE, INSIDE = "model.", "model.language_model."  # prefixes of the text model's tensors
VISION = ("model.visual.*",)


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, hybrid.NULLABLE)
    read_only(filled, hybrid.ONLY, found)
    mixers = hybrid.read_mixers(filled, found)
    shape = read_shape(filled, unsupported=found, partial=True)
    mlp = MLP.of(shape.hidden, shape.intermediate)
    spec = hybrid.model(
        ARCHITECTURE, config, shape, mixers, lambda index: (mlp, decoder.mlp_params(shape, f"model.layers.{index}"))
    )
    return alone(spec)


def alone(text: ModelSpec) -> ModelSpec:
    """The text model for files of the model with a vision tower, which transformers reads as the text model, too."""
    return replace(text, carried=(*text.carried, *VISION), read_prefixes=((ALONE, INSIDE),))


def tower(architecture: str, model_type: str) -> TextTower:
    """The model with a vision tower."""
    return TextTower(
        architecture=architecture,
        model_type=model_type,
        text_types=(f"{model_type}_text",),
        prefixes=((ALONE, INSIDE, INSIDE),),
        carried=VISION,
        tied=False,
    )


FAMILY = Family(ARCHITECTURE, "qwen3_5_text", build)
TOWER = tower("Qwen3_5ForConditionalGeneration", "qwen3_5")
