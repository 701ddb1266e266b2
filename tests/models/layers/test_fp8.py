"""Blocks that multiply in FP8: which matrices, gradients close to exact ones, NaN, memory."""

import pytest
import torch

from rptrain.kernels import fp8
from rptrain.models.adapters.freeze import freeze
from rptrain.models.adapters.lora import LoRA, with_lora
from rptrain.models.fp8 import with_fp8
from rptrain.models.registry import build
from rptrain.utils.errors import UserError
from tests.engine import plain

from .test_layers import assert_memory_bounds


def block(fresh, dtype=torch.float32, architecture="LlamaForCausalLM", **sizes):
    """A layer, its parameters as a device in FP8 prepares them, the exact ones, and gradient accumulators."""
    model = fresh(architecture, dtype, **{"head_dim": 64, "hidden_size": 256, "intermediate_size": 320} | sizes)
    spec = with_fp8(model.spec)
    layer = spec.layers[0]
    exact, g = model.of(layer, model.params), model.of(layer, model.grads)
    prepared = dict(exact)
    generator = torch.Generator().manual_seed(2)
    for name in sorted(names(spec)):
        exact[name].normal_(std=exact[name].shape[1] ** -0.5, generator=generator)
        rows = fp8.quantize_rows(exact[name])
        prepared[name] = fp8.FP8Weight(rows, fp8.transpose(rows.codes))
    return layer, prepared, exact, g


def names(spec):
    return {param.name for unit in spec.units for param in unit.params if param.in_fp8}


def test_the_matrices_of_blocks_alone_are_multiplied_in_fp8():
    dense, experts = {"qkv", "o", "gate_up", "down"}, {"qkv", "o"}
    assert names(with_fp8(build(plain.CONFIG))) == dense
    assert names(with_fp8(build(plain.config(tie_word_embeddings=True)))) == dense
    assert names(with_fp8(build(plain.QWEN3_MOE))) == experts
    assert names(with_fp8(with_lora(build(plain.CONFIG), LoRA(r=16)))) == dense
    assert names(with_fp8(freeze(build(plain.CONFIG), ["*.mlp.*"]))) == dense
    assert names(with_fp8(build(plain.config(intermediate_size=40)))) == dense - {"down"}
    with pytest.raises(UserError, match=r"engine\.fp8: no matrix of this model's blocks has sizes that are multiples"):
        with_fp8(build(plain.config(hidden_size=24, head_dim=6)))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_point_where_exact_ones_do(architecture, dtype, fresh, micro_batch):
    layer, p, exact, g = block(fresh, dtype, architecture)
    torch.manual_seed(3)
    x, dy = (torch.randn(256, 256).to(dtype) for _ in range(2))
    mb = micro_batch(build(plain.config(head_dim=64)), [[64]] * 4, torch.randint(61, (256,)))
    dx = layer.backward(p, g, layer.recompute(p, x, mb), dy, mb)
    wide = {name: w.double() for name, w in exact.items()}
    sums = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in g.items()}
    other = widened(mb)
    expected = layer.backward(wide, sums, layer.recompute(wide, x.double(), other), dy.double(), other)
    assert cosine(dx, expected) > 0.997
    for name, gradient in g.items():
        assert cosine(gradient, sums[name]) > 0.995, name
    together = [torch.cat([t[name].double().flatten() for name in g]) for t in (g, sums)]
    assert cosine(*together) > 0.996
    assert cosine(*together) < 0.9999


def widened(mb):
    return type(mb)(**{**vars(mb), "cos": mb.cos.double(), "sin": mb.sin.double()})


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_reach_the_output_and_the_gradients(bad, fresh, micro_batch):
    layer, p, _, g = block(fresh)
    x, dy = (torch.randn(32, 256) for _ in range(2))
    mb = micro_batch(build(plain.config(head_dim=64)), [[32]], torch.randint(61, (32,)))
    x[31, 7] = bad
    assert not layer.forward(p, x, mb)[31].isfinite().any()
    layer.backward(p, g, layer.recompute(p, x, mb), dy, mb)
    assert not any(g[name].isfinite().all() for name in ("qkv", "o", "gate_up", "down"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 160, 4, 2), (64, 32, 8, 8), (96, 32, 4, 1), (64, 640, 1, 1)])
def test_bounds_of_memory_hold(dtype, sizes, fresh, micro_batch):
    hidden, intermediate, heads, kv_heads = sizes
    layer, p, _, g = block(
        fresh,
        dtype,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    x, dy = (torch.randn(512, hidden).to(dtype) for _ in range(2))
    mb = micro_batch(build(plain.config(head_dim=64)), [[2]] * 256, torch.randint(61, (512,)))
    assert_memory_bounds(layer, p, g, x, dy, mb)
