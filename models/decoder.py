"""What decoders are put together from: parameters by their names in checkpoints, units, the head."""

from collections.abc import Mapping, Sequence
from typing import Any

from rptrain.models.hf_config import Sizes
from rptrain.models.layers import Block, Head
from rptrain.models.spec import LayerShape, ModelShape, Param, Part, Unit


def matrix(name: str, columns: int, std: float, *stacked: tuple[str, int]) -> Param:
    """The weights [rows, columns] of modules, given with their rows."""
    parts = tuple(Part(f"{module}.weight", rows) for module, rows in stacked)
    return Param(name, (sum(part.rows for part in parts), columns), parts, std=std)


def bias(name: str, *stacked: tuple[str, int]) -> Param:
    """The biases of modules, given with their sizes."""
    parts = tuple(Part(f"{module}.bias", size) for module, size in stacked)
    return Param(name, (sum(part.rows for part in parts),), parts, decay=False, std=0.0)


def norm(name: str, module: str, size: int) -> Param:
    return Param(name, (size,), (Part(f"{module}.weight", size),), decay=False, std=None)


def attention_params(sizes: Sizes, at: str, *, qk_norm: bool = False, biases: bool = False) -> list[Param]:
    """The first norm and the attention of the block whose names in checkpoints begin with `at`."""
    attention = f"{at}.self_attn"
    heads, kv_heads = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    qkv = (
        (f"{attention}.q_proj", heads),
        (f"{attention}.k_proj", kv_heads),
        (f"{attention}.v_proj", kv_heads),
    )
    o = (f"{attention}.o_proj", sizes.hidden)
    params = [
        norm("input_norm", f"{at}.input_layernorm", sizes.hidden),
        matrix("qkv", sizes.hidden, sizes.std, *qkv),
    ]
    if biases:
        params.append(bias("qkv_bias", *qkv))
    if qk_norm:
        params += [
            norm("q_norm", f"{attention}.q_norm", sizes.head_size),
            norm("k_norm", f"{attention}.k_norm", sizes.head_size),
        ]
    params.append(matrix("o", heads, sizes.std, o))
    if biases:
        params.append(bias("o_bias", o))
    return params


def post_norm(sizes: Sizes, at: str) -> Param:
    return norm("post_norm", f"{at}.post_attention_layernorm", sizes.hidden)


def dense_unit(sizes: Sizes, index: int, qk_norm: bool) -> Unit:
    """The parameters of a Block."""
    at = f"model.layers.{index}"
    gate_up = ((f"{at}.mlp.gate_proj", sizes.intermediate), (f"{at}.mlp.up_proj", sizes.intermediate))
    params = (
        *attention_params(sizes, at, qk_norm=qk_norm),
        post_norm(sizes, at),
        matrix("gate_up", sizes.hidden, sizes.std, *gate_up),
        matrix("down", sizes.intermediate, sizes.std, (f"{at}.mlp.down_proj", sizes.hidden)),
    )
    return Unit(f"layers.{index}", params)


def dense_block(sizes: Sizes, index: int, qk_norm: bool) -> Block:
    """The block of `dense_unit`, which is the model's unit after the embedding's and those of earlier blocks."""
    return Block(
        name=f"layers.{index}",
        unit=index + 1,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        intermediate=sizes.intermediate,
        eps=sizes.eps,
        qk_norm=qk_norm,
    )


def with_ends(sizes: Sizes, blocks: Sequence[Unit]) -> tuple[tuple[Unit, ...], Head]:
    """All units, from the embedding to the head's, and the head."""
    embed = Unit("embed", (matrix("embed", sizes.hidden, sizes.std, ("model.embed_tokens", sizes.vocab)),))
    units = [embed, *blocks, Unit("norm", (norm("norm", "model.norm", sizes.hidden),))]
    last = projection = len(units) - 1
    if sizes.tied:
        projection = 0
    else:
        units.append(Unit("head", (matrix("head", sizes.hidden, sizes.std, ("lm_head", sizes.vocab)),)))
        projection += 1
    head = Head(last, projection, "embed" if sizes.tied else "head", sizes.hidden, sizes.vocab, sizes.eps)
    return tuple(units), head


def model_shape(
    architecture: str,
    config: Mapping[str, Any],
    sizes: Sizes,
    blocks: Sequence[Unit],
    layers: Sequence[LayerShape],
) -> ModelShape:
    """The shape of a decoder with these blocks."""
    units, head = with_ends(sizes, blocks)
    return ModelShape(
        architecture=architecture,
        config=config,
        units=units,
        layers=tuple(layers),
        head=head,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        tied=sizes.tied,
    )
