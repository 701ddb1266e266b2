"""Llama 3 and models of its shape; Qwen3 builds on the same block."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.decoder import dense_block, dense_unit, model
from rptrain.models.hf_config import Shape, read_shape
from rptrain.models.spec import ModelSpec


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json; UserError if it asks for what is not supported."""
    return decoder("LlamaForCausalLM", config, read_shape(config))


def decoder(architecture: str, config: Mapping[str, Any], shape: Shape, qk_norm: bool = False) -> ModelSpec:
    """Embedding, blocks, norm and head; `qk_norm` puts a norm on every head's queries and keys."""
    blocks = [dense_unit(shape, i, qk_norm) for i in range(shape.layers)]
    layers = [dense_block(shape, i, qk_norm) for i in range(shape.layers)]
    return model(architecture, config, shape, blocks, layers)
