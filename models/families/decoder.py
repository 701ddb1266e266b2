"""Building blocks of decoders: parameters by names in checkpoints, units, blocks and the head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from rptrain.models.families.config import Shape, Sizes
from rptrain.models.layer import Layer
from rptrain.models.layers.attention import Attention
from rptrain.models.layers.block import Block, FeedForward, Mixer
from rptrain.models.layers.head import Head
from rptrain.models.layers.mlp import SharedMLP
from rptrain.models.layers.norms import Norms
from rptrain.models.params import CheckpointPart, Param, Stack, Unit
from rptrain.models.spec import ModelSpec


def matrix(name: str, columns: int, std: float, *stacked: tuple[str, int]) -> Param:
    """A matrix of the weights [rows, columns] of modules, given with their rows."""
    parts = tuple(CheckpointPart(f"{module}.weight", rows) for module, rows in stacked)
    return Param(name, (sum(part.rows for part in parts), columns), parts, std=std)


def bias(name: str, *stacked: tuple[str, int]) -> Param:
    """A vector of the biases of modules, given with their sizes."""
    parts = tuple(CheckpointPart(f"{module}.bias", size) for module, size in stacked)
    return Param(name, (sum(part.rows for part in parts),), parts, decay=False, std=0.0)


def norm(name: str, module: str, size: int, *, zero_centered: bool = False) -> Param:
    """A norm's weight, initialized so that the norm multiplies by 1."""
    parts = (CheckpointPart(f"{module}.weight", size),)
    return Param(name, (size,), parts, decay=False, std=0.0 if zero_centered else None)


def attention_params(
    sizes: Sizes, at: str, attention: Attention, norms: Norms | None = None, *, fused: bool = False
) -> list[Param]:
    """The parameters of the attention and its norms, in the block with prefix `at` in checkpoints.

    `norms`: of the block; None: before its parts. `fused`: checkpoints have one tensor of queries, keys and values.
    """
    norms = norms or Norms(sizes.eps)
    module, zero_centered = f"{at}.self_attn", norms.zero_centered
    heads, kv_heads = attention.heads * attention.head_size, attention.kv_heads * attention.head_size
    qkv = (
        (f"{module}.q_proj", heads * (1 + attention.gated)),
        (f"{module}.k_proj", kv_heads),
        (f"{module}.v_proj", kv_heads),
    )
    if fused:
        qkv = ((f"{module}.qkv_proj", heads + 2 * kv_heads),)
    o = (f"{module}.o_proj", sizes.hidden)
    params = [input_norm(sizes, at, zero_centered=zero_centered)] if norms.pre else []
    params.append(matrix("qkv", sizes.hidden, sizes.std, *qkv))
    if attention.qkv.bias:
        params.append(bias("qkv_bias", *qkv))
    if attention.qk_norm:
        widths = (heads, kv_heads) if attention.whole_qk_norm else (attention.head_size, attention.head_size)
        params += [
            norm(f"{x}_norm", f"{module}.{x}_norm", width, zero_centered=attention.zero_centered)
            for x, width in zip("qk", widths, strict=True)
        ]
    params.append(matrix("o", heads, sizes.std, o))
    if attention.o.bias:
        params.append(bias("o_bias", o))
    if norms.post:
        after = f"{at}.post_attention_layernorm"
        params.append(norm("attention_norm", after, sizes.hidden, zero_centered=zero_centered))
    return params


def input_norm(sizes: Sizes, at: str, *, zero_centered: bool = False) -> Param:
    """The norm of the mixer's input."""
    return norm("input_norm", f"{at}.input_layernorm", sizes.hidden, zero_centered=zero_centered)


def post_norm(sizes: Sizes, at: str, *, zero_centered: bool = False) -> Param:
    """The norm of the MLP's input, which is behind the mixer."""
    return norm("post_norm", f"{at}.post_attention_layernorm", sizes.hidden, zero_centered=zero_centered)


def mlp_params(sizes: Sizes, at: str, *, fused: bool = False) -> list[Param]:
    """The parameters of the MLP in the block with prefix `at` in checkpoints, without norms.

    `fused`: checkpoints have one tensor of gate and up.
    """
    gate_up = ((f"{at}.mlp.gate_proj", sizes.intermediate), (f"{at}.mlp.up_proj", sizes.intermediate))
    if fused:
        gate_up = ((f"{at}.mlp.gate_up_proj", 2 * sizes.intermediate),)
    return [
        matrix("gate_up", sizes.hidden, sizes.std, *gate_up),
        matrix("down", sizes.intermediate, sizes.std, (f"{at}.mlp.down_proj", sizes.hidden)),
    ]


def dense_unit(
    sizes: Sizes, index: int, attention: Attention, norms: Norms | None = None, *, fused: bool = False
) -> Unit:
    """The parameters of a block with attention and an MLP: see `attention_params` and `mlp_params`."""
    norms = norms or Norms(sizes.eps)
    zero_centered = norms.zero_centered
    at = f"model.layers.{index}"
    params = attention_params(sizes, at, attention, norms, fused=fused)
    if norms.pre:
        params.append(post_norm(sizes, at, zero_centered=zero_centered))
    params += mlp_params(sizes, at, fused=fused)
    if norms.post:
        after = f"{at}.post_feedforward_layernorm"
        params.append(norm("mlp_norm", after, sizes.hidden, zero_centered=zero_centered))
    return Unit(f"layers.{index}", tuple(params))


def expert_matrices(
    sizes: Sizes,
    at: str,
    intermediate: int,
    experts: int,
    stored: str = "mlp.experts",
    kinds: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Param, Param]:
    """The matrices of experts, one after the other, gate before up: gate_up [2IE, D], down [DE, I].

    Checkpoints have a tensor for each expert and matrix, in modules named by `stored` and `kinds`, as transformers
    saves them, or one for all experts of a layer, as in its modules: gate_up_proj [E, 2I, D] and down_proj [E, D, I].
    """
    names = [f"{at}.{stored}.{expert}" for expert in range(experts)]
    gate_up = [(f"{name}.{kind}", intermediate) for name in names for kind in kinds[:2]]
    down = [(f"{name}.{kinds[2]}", sizes.hidden) for name in names]

    def whole(matrices: Param) -> Param:
        name = matrices.name.replace("experts_", "experts.")
        return replace(matrices, stack=Stack(f"{at}.mlp.{name}_proj", experts))

    return (
        whole(matrix("experts_gate_up", sizes.hidden, sizes.std, *gate_up)),
        whole(matrix("experts_down", intermediate, sizes.std, *down)),
    )


def shared_expert_params(sizes: Sizes, shared: SharedMLP, module: str) -> list[Param]:
    """The parameters of the MLP beside experts: of `module` in checkpoints, and of {module}_gate if it has a gate."""
    width = shared.intermediate
    gate_up = ((f"{module}.gate_proj", width), (f"{module}.up_proj", width))
    params = [
        matrix("shared_gate_up", sizes.hidden, sizes.std, *gate_up),
        matrix("shared_down", width, sizes.std, (f"{module}.down_proj", sizes.hidden)),
    ]
    if shared.gated:
        params.append(matrix("shared_gate", sizes.hidden, sizes.std, (f"{module}_gate", 1)))
    return params


def correction_unit(index: int, key: str, experts: int) -> Unit:
    """What is added to the scores of experts before a token's are chosen: a buffer that training does not change."""
    parts = (CheckpointPart(key, experts),)
    correction = Param("router_correction", (experts,), parts, decay=False, std=0.0, dtype=torch.float32)
    return Unit(f"layers.{index}.correction", (correction,), trainable=False)


def attention(sizes: Sizes, **options: Any) -> Attention:
    """The attention of a block. `options`: see `Attention.of`."""
    return Attention.of(sizes.hidden, (sizes.heads, sizes.kv_heads, sizes.head_size), eps=sizes.eps, **options)


def block(sizes: Sizes, index: int, mixer: Mixer, feed_forward: FeedForward, **options: Any) -> Block:
    """A block of these parts; its unit follows the embedding's and those of earlier blocks. `options`: other fields."""
    form: dict[str, Any] = {"norms": Norms(sizes.eps), "mixer": mixer, "feed_forward": feed_forward} | options
    return Block(name=f"layers.{index}", units=(index + 1,), hidden=sizes.hidden, **form)


def mtp_layers(layers: int, count: int) -> tuple[str, ...]:
    """Patterns for the tensors of `count` layers for multi-token prediction (MTP), which follow the model's `layers`.

    They are not trained, but `carried`.
    """
    return tuple(f"model.layers.{layers + number}.*" for number in range(count))


def model(
    architecture: str,
    config: Mapping[str, Any],
    shape: Shape,
    blocks: Sequence[Unit],
    layers: Sequence[Layer],
    *,
    logits_scale: float = 1.0,
    zero_centered: bool = False,
    extra: Mapping[int, Unit] | None = None,
) -> ModelSpec:
    """The decoder with these blocks, an embedding, a last norm and a head.

    `extra`: units of layers, by their numbers, in addition to `blocks`. `zero_centered`: of the last norm.
    """
    embed = Unit("embed", (matrix("embed", shape.hidden, shape.std, ("model.embed_tokens", shape.vocab)),))
    last_norm = norm("norm", "model.norm", shape.hidden, zero_centered=zero_centered)
    units = [embed, *blocks, Unit("norm", (last_norm,))]
    last = projection = len(units) - 1
    if shape.tied:
        projection = 0
    else:
        units.append(Unit("head", (matrix("head", shape.hidden, shape.std, ("lm_head", shape.vocab)),)))
        projection += 1
    name = "embed" if shape.tied else "head"
    layers = list(layers)
    for index, unit in (extra or {}).items():
        layers[index] = replace(cast(Any, layers[index]), units=(*layers[index].units, len(units)))
        units.append(unit)
    return ModelSpec(
        architecture=architecture,
        config=config,
        units=tuple(units),
        layers=tuple(layers),
        head=Head(
            units=(last, projection),
            projection=name,
            hidden=shape.hidden,
            vocab=shape.vocab,
            eps=shape.eps,
            scale=logits_scale,
            zero_centered=zero_centered,
        ),
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        rotaries=shape.rotaries,
        tied=shape.tied,
        padding_row=shape.padding_row,
    )
