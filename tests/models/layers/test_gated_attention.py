"""Attention with a gated output and zero-centered norms, in blocks beside an MLP."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rptrain.kernels.fp8 import Operand
from rptrain.models.families import decoder
from rptrain.models.families.config import read_shape
from rptrain.models.layers.block import blocks
from rptrain.models.layers.mlp import MLP
from rptrain.models.layers.state import CurrentTokens
from rptrain.models.params import CheckpointPart
from rptrain.models.spec import ModelSpec
from rptrain.models.weights import pretrained
from tests.cases import grid
from tests.models.conftest import COMMON, Native
from tests.models.layers.test_kept_bytes import TRANSFORMS, WITH_EXPERTS_ALONE, assert_kept_bytes
from tests.models.layers.test_layers import assert_memory_bounds
from tests.models.transforms.test_fp8 import assert_near_exact_gradients, block_of

DOCUMENTS = [[5, 6], [11]]
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def gated(
    heads: int = 6, kv_heads: int = 1, head_size: int = 16, hidden: int = 32, intermediate: int = 48
) -> ModelSpec:
    """A model of two blocks."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_size}
    sizes |= {"hidden_size": hidden, "intermediate_size": intermediate, "rms_norm_eps": 1e-3}
    config = {**COMMON, **sizes, "rope_parameters": ROPE, "tie_word_embeddings": False}
    shape = read_shape(config, partial=True)
    attention = decoder.attention(shape, qk_norm=True, zero_centered=True, gated=True)
    units = [decoder.dense_unit(shape, index, attention) for index in range(shape.layers)]
    mlp = MLP.of(shape.hidden, shape.intermediate)
    layers = [decoder.block(shape, index, attention, mlp) for index in range(shape.layers)]
    return decoder.model("Gated", config, shape, units, layers)


def model(dtype: torch.dtype = torch.float32, transform: str = "none", **sizes: int) -> Native:
    """Random parameters; norms and adapters are initialized to zeros, or to ones, which would hide errors."""
    made = Native(TRANSFORMS[transform](gated(**sizes)), dtype)
    pretrained.initialize(made.spec, made.view, seed=1)
    assert not any(params[name].any() for params in made.params[1:3] for name in ("q_norm", "k_norm"))
    generator = torch.Generator().manual_seed(2)
    for unit, params in zip(made.spec.units, made.params, strict=True):
        for param in unit.params:
            if not param.std:
                params[param.name].add_(torch.rand(param.shape, generator=generator) - 0.5)
    return made


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(6, 1, 16), (8, 1, 24), (12, 2, 8), (3, 3, 16), (2, 1, 256)]
)
def test_output_and_gradients_are_those_of_transformers(heads, kv_heads, head_size, micro_batch) -> None:
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5TextRotaryEmbedding

    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_size}
    config = Qwen3_5TextConfig(**{**COMMON, "hidden_size": 32, **sizes, "rms_norm_eps": 1e-3, "rope_parameters": ROPE})
    config._attn_implementation = "sdpa"
    theirs, rotary = Qwen3_5Attention(cast(Any, config), 0), Qwen3_5TextRotaryEmbedding(config)
    ours = model(heads=heads, kv_heads=kv_heads, head_size=head_size)
    block, p, g = blocks(ours.spec)[0], ours.params[1], ours.grads[1]
    weights = ours.tensors(ours.params)
    at = "model.layers.0.self_attn."
    theirs.load_state_dict({name.removeprefix(at): x for name, x in weights.items() if name.startswith(at)})

    mb = micro_batch(ours.spec, DOCUMENTS)
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(22, 32, generator=generator) for _ in range(2))
    leaf = x.clone().requires_grad_()
    expected = []
    for part in leaf.split([5, 6, 11]):
        angles = rotary(part, torch.arange(len(part)).unsqueeze(0))
        expected.append(theirs(part.unsqueeze(0), angles, None)[0].squeeze(0))
    expected = torch.cat(expected)
    expected.backward(dy)

    y, saved = block.mixer.forward(p, Operand(x.dtype, x), mb)
    dx = block.mixer.backward(p, g, saved, dy, mb)
    close(y, expected)
    close(dx, leaf.grad)
    gradients = ours.gradients()
    for name, parameter in theirs.named_parameters():
        close(gradients[at + name], parameter.grad)


def close(ours: Tensor, theirs: Tensor | None) -> None:
    """Within 1e-5 of the largest value."""
    assert theirs is not None
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_decoding_a_token_at_a_time_is_the_forward_pass(micro_batch) -> None:
    made = model()
    mixer, p = blocks(made.spec)[0].mixer, made.params[1]
    mb = micro_batch(made.spec, [[9]])
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(3))
    expected, _ = mixer.forward(p, Operand(x.dtype, x), mb)
    state, found = mixer.new_state(1, x.dtype, x.device), []
    for token in range(9):
        tables = micro_batch(made.spec, [[9]]).rotations
        rotations = [type(each)(each.cos[token : token + 1], each.sin[token : token + 1]) for each in tables]
        one = torch.tensor([token]), torch.tensor([0]), torch.tensor([0, 1], dtype=torch.int32)
        current = CurrentTokens(*one, [token + 1], rotations, None, single=True)
        found.append(mixer.step(p, Operand(x.dtype, x[token : token + 1]), state, current))
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("transform", ["none", "lora", "dora"])
def test_gradients_against_autograd_in_float64(transform, micro_batch) -> None:
    made = model(torch.float64, transform)
    ids, labels = torch.arange(22), torch.arange(30, 52)
    mb = micro_batch(made.spec, DOCUMENTS, labels, torch.float64)
    made.backward(ids, mb)
    trained = [unit for unit, each in enumerate(made.spec.units) if each.trainable]
    leaves = [tensor.requires_grad_() for unit in trained for tensor in made.params[unit].values()]
    expected = torch.nn.functional.cross_entropy(made.logits(ids, mb, keep=True), labels, reduction="sum")
    ours = [tensor for unit in trained for tensor in made.grads[unit].values()]
    for gradient, theirs in zip(ours, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name not in WITH_EXPERTS_ALONE])
def test_kept_bytes_are_those_of_the_kept_tensors(transform, micro_batch) -> None:
    assert_kept_bytes(gated(), transform, micro_batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 1, 64, 160), (8, 8, 64, 32), (1, 1, 64, 640), (8, 1, 64, 32)])
def test_bounds_of_memory_hold(sizes, dtype, micro_batch) -> None:
    heads, kv_heads, hidden, intermediate = sizes
    made = model(dtype, "none", heads=heads, kv_heads=kv_heads, head_size=64, hidden=hidden, intermediate=intermediate)
    mb = micro_batch(made.spec, [[2]] * 256)
    x, dy = (torch.randn(512, hidden).to(dtype) for _ in range(2))
    assert_memory_bounds(blocks(made.spec)[0], made.params[1], made.grads[1], x, dy, mb)


def test_q_proj_has_the_rows_of_queries_and_gates() -> None:
    unit = gated(heads=6, kv_heads=2, head_size=8).units[1]
    (qkv,) = (param for param in unit.params if param.name == "qkv")
    at = "model.layers.0.self_attn"
    rows = {"q_proj": 96, "k_proj": 16, "v_proj": 16}
    assert qkv.parts == tuple(CheckpointPart(f"{at}.{name}.weight", count) for name, count in rows.items())


@pytest.mark.parametrize("dtype", [grid(torch.float32), torch.bfloat16])
def test_gradients_in_fp8_point_where_exact_ones_do(dtype, micro_batch) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "head_size": 64, "hidden": 256, "intermediate": 320}
    assert_near_exact_gradients(*block_of(model(dtype, "none", **sizes)), dtype, micro_batch, least=0.994)


def test_work_by_hand() -> None:
    """6 tokens of 32 columns, with queries and gates of 96 columns and keys of 16."""
    layer = blocks(gated())[0]
    forward, backward = layer.work(6, 3, 2)
    assert forward.matmul == 2 * 6 * 32 * (96 + 96 + 16 + 16 + 96 + 3 * 48)
    assert forward.elementwise["output gate"] == 2 * 6 * 3 * 96
    assert backward.elementwise["output gate, backward"] == 2 * 6 * 6 * 96
    rotated = forward.elementwise["rotation"], backward.elementwise["rotation, backward"]
    assert rotated == (2 * 6 * 2 * 112, 2 * 6 * (3 * 112 + 2 * 16))
    assert layer.mixer.sizes is None
