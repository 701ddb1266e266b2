"""Llama 3 and models of its shape; Qwen3 builds on the same block."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.hf_config import Shape, read_shape
from rptrain.models.layers import Block, Head
from rptrain.models.spec import ModelSpec, Param, Part, Unit


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json; UserError if it asks for what is not supported."""
    return decoder("LlamaForCausalLM", config, read_shape(config))


def decoder(architecture: str, config: Mapping[str, Any], shape: Shape, qk_norm: bool = False) -> ModelSpec:
    """Embedding, blocks, norm and head; `qk_norm` puts a norm on every head's queries and keys."""
    embed = Unit("embed", (_matrix(shape, "embed", shape.hidden, ("model.embed_tokens", shape.vocab)),))
    blocks = [_block_unit(shape, i, qk_norm) for i in range(shape.layers)]
    units = [embed, *blocks, Unit("norm", (_norm("norm", "model.norm", shape.hidden),))]
    norm = projection = len(units) - 1
    if shape.tied:
        projection = 0
    else:
        units.append(Unit("head", (_matrix(shape, "head", shape.hidden, ("lm_head", shape.vocab)),)))
        projection += 1
    layers = tuple(
        Block(
            name=unit.name,
            unit=i,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            intermediate=shape.intermediate,
            eps=shape.eps,
            qk_norm=qk_norm,
        )
        for i, unit in enumerate(blocks, 1)
    )
    return ModelSpec(
        architecture=architecture,
        config=config,
        units=tuple(units),
        layers=layers,
        head=Head(norm, projection, "embed" if shape.tied else "head", shape.hidden, shape.vocab, shape.eps),
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        inv_freq=shape.inv_freq,
        tied=shape.tied,
    )


def _block_unit(shape: Shape, index: int, qk_norm: bool) -> Unit:
    at = f"model.layers.{index}"
    attention, mlp = f"{at}.self_attn", f"{at}.mlp"
    heads, kv_heads = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    qkv = (
        (f"{attention}.q_proj", heads),
        (f"{attention}.k_proj", kv_heads),
        (f"{attention}.v_proj", kv_heads),
    )
    gate_up = ((f"{mlp}.gate_proj", shape.intermediate), (f"{mlp}.up_proj", shape.intermediate))
    params = [
        _norm("input_norm", f"{at}.input_layernorm", shape.hidden),
        _matrix(shape, "qkv", shape.hidden, *qkv),
    ]
    if qk_norm:
        params += [
            _norm("q_norm", f"{attention}.q_norm", shape.head_size),
            _norm("k_norm", f"{attention}.k_norm", shape.head_size),
        ]
    params += [
        _matrix(shape, "o", heads, (f"{attention}.o_proj", shape.hidden)),
        _norm("post_norm", f"{at}.post_attention_layernorm", shape.hidden),
        _matrix(shape, "gate_up", shape.hidden, *gate_up),
        _matrix(shape, "down", shape.intermediate, (f"{mlp}.down_proj", shape.hidden)),
    ]
    return Unit(f"layers.{index}", tuple(params))


def _matrix(shape: Shape, name: str, columns: int, *stacked: tuple[str, int]) -> Param:
    parts = tuple(Part(f"{module}.weight", rows) for module, rows in stacked)
    return Param(name, (sum(part.rows for part in parts), columns), parts, std=shape.std)


def _norm(name: str, module: str, size: int) -> Param:
    return Param(name, (size,), (Part(f"{module}.weight", size),), decay=False, std=None)
