"""Llama 3 and models of its shape; Mistral, Qwen2 and Qwen3 build on the same block."""

from collections.abc import Mapping, Sequence
from typing import Any

from rptrain.models.families.config import Shape, read_flag, read_shape
from rptrain.models.families.decoder import attention, block, dense_unit, model
from rptrain.models.layers.mlp import MLP
from rptrain.models.layers.norms import Norms
from rptrain.models.spec import ModelSpec


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    biases = read_flag(config, "attention_bias", found)
    shape = read_shape(config, unsupported=found, biases=biases)
    return decoder("LlamaForCausalLM", config, shape, qkv_bias=biases, o_bias=biases)


def decoder(
    architecture: str,
    config: Mapping[str, Any],
    shape: Shape,
    windows: Sequence[int | None] | None = None,
    rotaries: Sequence[int | None] | None = None,
    *,
    fused: bool = False,
    scale: float | None = None,
    embedding_scale: float = 1.0,
    output_scale: float = 1.0,
    logits_scale: float = 1.0,
    **form: bool,
) -> ModelSpec:
    """A decoder: embedding, blocks, norm and head.

    By layer, `windows` has the window, None for full attention, and `rotaries` the place of the rotary positions in
    `shape`, None for none. `fused`: checkpoints have one tensor of queries, keys and values, and one of gate and up.
    The scales are factors of attention's scores, of embeddings, of what attention and MLP add to the residual, and of
    logits. `form`: the norms and biases, see `attention_params`.
    """
    options: dict[str, Any] = form
    units = [dense_unit(shape, index, fused=fused, **options) for index in range(shape.layers)]
    norms = Norms(shape.eps, options.pop("pre_norms", True), options.pop("post_norms", False))
    layers = [
        block(
            shape,
            index,
            attention(shape, **options, window=window, rotary=rotary, scale=scale),
            MLP.of(shape.hidden, shape.intermediate),
            norms=norms,
            input_scale=1.0 if index else embedding_scale,
            output_scale=output_scale,
        )
        for index, (window, rotary) in enumerate(
            zip(windows or [None] * shape.layers, rotaries or [0] * shape.layers, strict=True)
        )
    ]
    return model(architecture, config, shape, units, layers, logits_scale=logits_scale)
