"""Llama 3 and models of its shape; Qwen3 builds on the same block."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.decoder import dense_block, dense_unit, with_ends
from rptrain.models.hf_config import Shape, read_shape
from rptrain.models.spec import ModelSpec


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json; UserError if it asks for what is not supported."""
    return decoder("LlamaForCausalLM", config, read_shape(config))


def decoder(architecture: str, config: Mapping[str, Any], shape: Shape, qk_norm: bool = False) -> ModelSpec:
    """Embedding, blocks, norm and head; `qk_norm` puts a norm on every head's queries and keys."""
    units, head = with_ends(shape, [dense_unit(shape, i, qk_norm) for i in range(shape.layers)])
    return ModelSpec(
        architecture=architecture,
        config=config,
        units=units,
        layers=tuple(dense_block(shape, i, qk_norm) for i in range(shape.layers)),
        head=head,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        inv_freq=shape.inv_freq,
        rope_scale=shape.rope_scale,
        tied=shape.tied,
    )
