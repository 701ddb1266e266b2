"""Llama 3 and models of its shape; Mistral, Qwen2 and Qwen3 build on the same block."""

from collections.abc import Mapping, Sequence
from typing import Any

from rptrain.models.layers.decoder import block_sizes, dense_unit, model
from rptrain.models.layers.mlp import Block
from rptrain.models.spec import ModelSpec
from rptrain.models.weights.hf_config import Shape, read_shape


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    return decoder("LlamaForCausalLM", config, read_shape(config))


def decoder(
    architecture: str,
    config: Mapping[str, Any],
    shape: Shape,
    windows: Sequence[int | None] | None = None,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> ModelSpec:
    """A decoder: embedding, blocks, norm and head. `windows` has each layer's window, None for full attention.

    `qk_norm` adds a norm to every head's queries and keys, `qkv_bias` a bias to queries, keys and values.
    """
    units = [dense_unit(shape, index, qk_norm=qk_norm, qkv_bias=qkv_bias) for index in range(shape.layers)]
    layers = [
        Block(**block_sizes(shape, index), window=window, qk_norm=qk_norm, qkv_bias=qkv_bias)
        for index, window in enumerate(windows or [None] * shape.layers)
    ]
    return model(architecture, config, shape, units, layers)
