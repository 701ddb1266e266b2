"""Granite, the dense models: Llama's block with factors of embeddings, attention's scores, residual sums and logits.

Some published config.json name a dropout rate. Training here has none.
"""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import read_flag, read_number, read_shape
from rptrain.models.families.family import Family
from rptrain.models.families.llama import Factors, decoder
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "GraniteForCausalLM"
FACTORS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    biases = read_flag(config, "attention_bias", found)
    scores, embeddings, residual, logits = (read_number(config, key, found, 1.0, float) for key in FACTORS)
    shape = read_shape({**config, "attention_dropout": 0.0}, unsupported=found, biases=biases)
    factors = Factors(scores, embeddings, residual, 1 / logits)
    return decoder(ARCHITECTURE, config, shape, factors=factors, qkv_bias=biases, o_bias=biases)


FAMILY = Family(ARCHITECTURE, "granite", build)
