"""Blocks that multiply in FP8: which matrices, gradients close to exact ones, NaN, memory."""

import sys
from collections import defaultdict
from dataclasses import replace
from math import prod

import pytest
import torch

from rptrain.kernels.batch import Rotation
from rptrain.kernels.fp8 import FP8Weight, quantize_rows
from rptrain.models.families.registry import build
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.models.transforms.quantize import with_base
from rptrain.schedule.costs import Work
from rptrain.schedule.machine import CARDS
from rptrain.utils.errors import UserError
from tests.cases import grid
from tests.engine import plain

from ..layers.test_layers import LiveBytes, assert_memory_bounds

MIXTURES = ("Qwen3MoeForCausalLM", "GptOssForCausalLM")
SIZES = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 320, "moe_intermediate_size": 320}


def block(fresh, dtype=torch.float32, architecture="LlamaForCausalLM", **sizes):
    """Of a family's model."""
    return block_of(fresh(architecture, dtype, **SIZES | sizes))


def block_of(model):
    """A layer, its parameters as a device in FP8 prepares them, the exact ones, and gradient accumulators."""
    spec = with_fp8(model.spec)
    layer = spec.layers[0]
    exact, g = model.of(layer, model.params), model.of(layer, model.grads)
    prepared = dict(exact)
    generator = torch.Generator().manual_seed(2)
    marked = {param.name: param for index in layer.units for param in spec.units[index].params if param.in_fp8}
    for name, param in sorted(marked.items()):
        exact[name].normal_(std=exact[name].shape[1] ** -0.5, generator=generator)
        prepared[name] = param.fp8_view(torch.empty(param.fp8_bytes(columns=True), dtype=torch.uint8), columns=True)
        prepared[name].write(exact[name])
    return layer, prepared, exact, g


def names(spec):
    return {param.name for unit in spec.units for param in unit.params if param.in_fp8}


def test_the_matrices_of_blocks_alone_are_multiplied_in_fp8():
    dense, experts = {"qkv", "o", "gate_up", "down"}, {"qkv", "o", "experts_gate_up", "experts_down"}
    assert names(with_fp8(build(plain.CONFIG))) == dense
    assert names(with_fp8(build(plain.config(tie_word_embeddings=True)))) == dense
    for config in (plain.QWEN3_MOE | {"moe_intermediate_size": 16}, plain.GPT_OSS):
        assert names(with_fp8(build(config))) == experts
    assert names(with_fp8(build(plain.QWEN3_MOE))) == {"qkv", "o"}  # experts of 12 columns
    assert names(with_fp8(with_lora(build(plain.CONFIG), LoRA(r=16)))) == dense
    assert names(with_fp8(freeze(build(plain.CONFIG), ["*.mlp.*"]))) == dense
    assert names(with_fp8(build(plain.config(intermediate_size=40)))) == dense - {"down"}
    with pytest.raises(UserError, match=r"no matrix .* has sizes that are multiples of 16; remove engine\.fp8"):
        with_fp8(build(plain.config(hidden_size=24, head_dim=6)))


def test_weights_of_experts_lie_as_they_are_stored():
    """Scales belong to rows in memory; forward stages have transposed codes only where these rows are inputs."""
    lora = with_lora(build(plain.GPT_OSS), LoRA(r=3))
    kinds = {  # of gate_up: experts, inputs, outputs
        "by output": (build(plain.QWEN3_MOE | {"moe_intermediate_size": 48}), (5, 96, 32), False),
        "by input": (build(plain.GPT_OSS), (5, 32, 96), True),
        "MXFP4": (with_base(lora, "mxfp4"), (5, 96, 32), False),
    }
    for spec, sizes, by_input in kinds.values():
        params = [param for unit in with_fp8(spec).units for param in unit.params]
        param = next(param for param in params if param.name == "experts_gate_up")
        rows, numel = sizes[0] * sizes[1], prod(sizes)
        for backward in (False, True):
            columns = param.reads_columns(backward=backward)
            assert columns == (backward or by_input)
            assert param.fp8_bytes(columns=columns) == -(-(4 * rows + (1 + columns) * numel) // 128) * 128
            w = param.fp8_view(torch.zeros(param.fp8_bytes(columns=columns), dtype=torch.uint8), columns=columns)
            assert (w.columns is not None) == columns and w.by_input == by_input
            assert w.rows.codes.shape == sizes and w.rows.scales.shape == sizes[:2]
            values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
            w.write(param.dequantized_view(values) if param.transposed else values.view(param.shape))
            expected = quantize_rows(values.view(rows, -1))
            assert torch.equal(w.rows.codes.float().view(rows, -1), expected.codes.float())
            assert torch.equal(w.rows.scales.flatten(), expected.scales)
            assert w.columns is None or torch.equal(w.columns.float(), w.rows.codes.float().mT)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_point_where_exact_ones_do(architecture, dtype, fresh, micro_batch):
    assert_near_exact_gradients(*block(fresh, dtype, architecture), dtype, micro_batch)


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("dtype", [grid(torch.float32), torch.bfloat16])
def test_gradients_of_experts_point_where_exact_ones_do(architecture, dtype, fresh, micro_batch):
    """With attention as it is: its rounding sends some tokens to other experts."""
    layer, p, exact, g = block(fresh, dtype, architecture)
    assert isinstance(p["experts_gate_up"], FP8Weight) and isinstance(p["experts_down"], FP8Weight)
    assert_near_exact_gradients(layer, p | {name: exact[name] for name in ("qkv", "o")}, exact, g, dtype, micro_batch)


def assert_near_exact_gradients(layer, p, exact, g, dtype, micro_batch, least=0.995):
    """Means over batches, because the error of a norm of heads, which has few elements, differs between batches."""
    found: dict[str, list[float]] = {}
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        x, dy = (torch.randn(256, 256, generator=generator).to(dtype) for _ in range(2))
        labels = torch.randint(61, (256,), generator=generator)
        mb = micro_batch(build(plain.config(head_dim=64)), [[64]] * 4, labels)
        for total in g.values():
            total.zero_()
        dx = layer.backward(p, g, layer.recompute(p, x, mb), dy, mb)
        wide = {name: w.double() for name, w in exact.items()}
        sums = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in g.items()}
        other = widened(mb)
        expected = layer.backward(wide, sums, layer.recompute(wide, x.double(), other), dy.double(), other)
        together = [torch.cat([t[name].double().flatten() for name in g]) for t in (g, sums)]
        pairs = {name: (gradient, sums[name]) for name, gradient in g.items()}
        for name, pair in (pairs | {"input": (dx, expected), "together": together}).items():
            found.setdefault(name, []).append(cosine(*pair).item())
    means = {name: sum(each) / len(each) for name, each in found.items()}
    assert means.pop("input") > 0.997 and 0.9965 < means.pop("together") < 0.9999
    assert min(means.values()) > least, means


@pytest.mark.parametrize("architecture", MIXTURES)
def test_work_of_experts_by_hand(architecture, fresh):
    """10 tokens of 256 columns, 30 rows for experts of 320: gate_up has 640 outputs; attention has heads of 64."""
    spec = with_fp8(fresh(architecture, **SIZES).spec)
    layer = spec.layers[0]
    exact = layer.with_products(lambda each: replace(each, in_fp8=each.name in ("qkv", "o")))
    works, wide = layer.work(10, 5, 2), exact.work(10, 5, 2)
    quantized, gathered = (10, 1) if architecture == "Qwen3MoeForCausalLM" else (30, 2)  # rows; bytes per element
    for work, other in zip(works, wide, strict=True):
        assert (work.grouped, work.grouped_fp8) == (0, other.grouped)
        assert (work.flops, other.grouped_fp8) == (other.flops, 0) and work.fp8 == other.fp8
        weights = 5 * 256 * 320 * 3
        assert other.traffic - work.traffic == weights + (2 - gathered) * (10 + 30) * 256
    inputs = 3 * (quantized * 256 + 30 * 320)  # 2 bytes are read, 1 is written
    assert works[0].quantization - wide[0].quantization == inputs
    transposed, outputs = 2 * 30 * (256 + 320), 30 * (640 + 256)
    assert works[1].quantization - wide[1].quantization == inputs + transposed + (3 + 5) * outputs
    params = {param.name: param for unit in layer.units for param in spec.units[unit].params}
    parts = [layer.gradient_work(params[name], 10, 2) for name in ("experts_gate_up", "experts_down")]
    assert sum(part.grouped_fp8 for part in parts) == works[0].grouped_fp8
    assert sum(part.quantization for part in parts) == inputs + transposed + 5 * outputs
    for name in ("router", "post_norm"):
        assert not layer.gradient_work(params[name], 10, 2).grouped_fp8
    for name in ("qkv", "o"):
        assert layer.gradient_work(params[name], 10, 2).fp8 == exact.gradient_work(params[name], 10, 2).fp8 > 0
    experts = [params[product.name] for product in layer.expert_products]
    assert not any(exact.gradient_work(param, 10, 2).grouped_fp8 for param in experts)
    card = CARDS["rtx4090"]
    seconds = [card.seconds(Work(**{kind: 1e15})) for kind in ("grouped", "grouped_fp8", "matmul", "fp8")]
    assert seconds[0] / seconds[1] == pytest.approx(card.rates.fp8 / card.rates.bf16)
    assert seconds[2] / seconds[3] == pytest.approx(card.rates.fp8 / card.rates.bf16)


def widened(mb):
    return replace(mb, rotations=tuple(Rotation(each.cos.double(), each.sin.double()) for each in mb.rotations))


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


@pytest.mark.sample(5)
@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 160, 5), (96, 32, 5), (64, 640, 5), grid((64, 32, 16)), grid((64, 48, 300))])
def test_bounds_of_memory_of_experts_hold(architecture, dtype, sizes, fresh, micro_batch):
    hidden, intermediate, experts = sizes
    layer, p, _, g = block(
        fresh,
        dtype,
        architecture,
        hidden_size=hidden,
        intermediate_size=intermediate,
        moe_intermediate_size=intermediate,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=experts,
        num_local_experts=experts,
    )
    torch.manual_seed(6)
    x, dy = (torch.randn(512, hidden).to(dtype) for _ in range(2))
    mb = micro_batch(build(plain.config(head_dim=64)), [[2]] * 256, torch.randint(61, (512,)))
    assert_memory_bounds(layer, p, g, x, dy, mb)


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("sizes", [(96, 96, 32, 4, 512), (128, 48, 128, 8, 512), (64, 256, 32, 4, 64)])
def test_bounds_of_memory_of_experts_hold_with_fused_kernels(architecture, sizes, fresh, micro_batch, monkeypatch):
    """In the backward of the MLP, with kernels that compute nothing: what they are given takes the memory."""
    jit = pytest.importorskip("triton.runtime.jit")
    hidden, intermediate, experts, active, tokens = sizes
    layer, p, _, g = block(
        fresh,
        torch.bfloat16,
        architecture,
        hidden_size=hidden,
        intermediate_size=intermediate,
        moe_intermediate_size=intermediate,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=experts,
        num_local_experts=experts,
        num_experts_per_tok=active,
    )
    torch.manual_seed(6)
    x, dy = (torch.randn(tokens, hidden).to(torch.bfloat16) for _ in range(2))
    mb = micro_batch(build(plain.config(head_dim=64)), [[2]] * (tokens // 2), torch.randint(61, (tokens,)))
    saved = layer.recompute(p, x, mb)[1]
    for module in (module for name, module in list(sys.modules.items()) if name.startswith("rptrain.kernels.")):
        for name, value in list(vars(module).items()):
            if isinstance(value, jit.KernelInterface):
                monkeypatch.setattr(module, name, defaultdict(lambda: lambda *args, **options: None))
        for name in ("fused", "_on_gpu"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *tensors: True)
    with LiveBytes() as live:
        layer.feed_forward_backward(p, g, saved, dy, mb)
    bound = layer.workspace_bytes(tokens, 2, fused=True) - dy.nbytes
    assert live.peak <= bound <= 1.25 * live.peak
