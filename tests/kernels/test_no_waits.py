"""On CUDA no operation waits for the device, so that the host runs ahead of it.

That holds once kernels are compiled and constants are on the device. `quantize` is not here: it is for loading. The
loss has a test of its own.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from rptrain.kernels import (
    causal_conv,
    delta_gates,
    fp8,
    gated_norm,
    grouped,
    grouped_fp8,
    grouped_lora,
    linear,
    lora,
    moe,
    moe_rows,
    output_gate,
    quant,
    rms_norm,
    rope,
    swiglu,
)
from rptrain.kernels.attention import attention, attention_backward
from rptrain.kernels.batch import Rotation
from rptrain.kernels.dropout import Dropout, add_dropout, dropout
from rptrain.kernels.fp8 import Form
from rptrain.kernels.reference.dense import Clamp, QKNorm, split_gates, split_heads
from rptrain.kernels.target import read
from tests.kernels.delta_net import Sizes, views
from tests.kernels.exact import dtypes, random

TOKENS, WIDTH, HEADS, KV_HEADS, SIZE, EXPERTS, ACTIVE = 48, 32, 4, 2, 16, 5, 2
QKV = (HEADS + 2 * KV_HEADS) * SIZE
Rand = Callable[..., Tensor]
Run = Callable[[], object]


def zeros(*shape: int) -> Tensor:
    """An accumulator."""
    return torch.zeros(shape, device="cuda")


def heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return split_heads(qkv, KV_HEADS, SIZE)


def norms(rand: Rand) -> Run:
    x, residual, dy = rand(3, TOKENS, WIDTH).unbind()
    weight, total = rand(WIDTH), zeros(WIDTH)

    def run() -> None:
        _, rstd = rms_norm.rms_norm(x, weight, 1e-6)
        rms_norm.rms_norm_operand(x, residual, weight, 1e-6, Form.PLAIN)
        rms_norm.rms_norm_backward(dy, x, weight, rstd, total)
        rms_norm.rms_norm_backward(dy, x, weight, rstd, total, residual)

    return run


def rotation(rand: Rand) -> Run:
    qkv, (dq, dk, dv) = rand(TOKENS, QKV), heads(rand(TOKENS, QKV))
    rotation = Rotation(zeros(TOKENS, SIZE // 2).cos(), zeros(TOKENS, SIZE // 2))
    norm, totals = QKNorm(rand(SIZE), rand(SIZE), 1e-6), (zeros(SIZE), zeros(SIZE))

    def run() -> None:
        *_, rstd = rope.qk_norm_rope(qkv, rotation, KV_HEADS, SIZE, norm)
        rope.qk_norm_rope_backward(dq, dk, dv, qkv, rotation, norm, rstd, totals)
        rope.qk_norm_rope(qkv, rotation, KV_HEADS, SIZE)
        rope.qk_norm_rope_backward(dq, dk, dv, qkv, rotation)

    return run


def gated_attention(rand: Rand) -> Run:
    """Norms and rotation of queries beside gates, and the gates."""
    qkv, (dq, dk, dv) = rand(TOKENS, QKV + HEADS * SIZE), heads(rand(TOKENS, QKV))
    rotation = Rotation(zeros(TOKENS, SIZE // 4).cos(), zeros(TOKENS, SIZE // 4))
    norm, totals = QKNorm(rand(SIZE), rand(SIZE), 1e-6, zero_centered=True), (zeros(SIZE), zeros(SIZE))
    out, dy, gates = rand(TOKENS, HEADS, SIZE), rand(TOKENS, HEADS * SIZE), split_gates(qkv, KV_HEADS, SIZE)

    def run() -> None:
        *_, rstd = rope.qk_norm_rope(qkv, rotation, KV_HEADS, SIZE, norm, gated=True)
        output_gate.output_gate(out, gates, Form.PLAIN)
        output_gate.output_gate_backward(dy, out, gates)
        rope.qk_norm_rope_backward(dq, dk, dv, qkv, rotation, norm, rstd, totals, gated=True)

    return run


def activation(rand: Rand) -> Run:
    gate_up, out = rand(2, TOKENS, 2 * WIDTH).unbind()
    dy, act = rand(2, TOKENS, WIDTH).unbind()

    def run() -> None:
        for interleaved, clamp in ((False, None), (True, Clamp())):
            swiglu.swiglu(gate_up, interleaved=interleaved, clamp=clamp)
            swiglu.swiglu_backward(dy, gate_up, interleaved=interleaved, clamp=clamp)
            swiglu.swiglu_backward(dy, gate_up, out, act, interleaved=interleaved, clamp=clamp)

    return run


def delta_net(rand: Rand) -> Run:
    """All but the delta rule."""
    sizes = Sizes(KV_HEADS, 2, SIZE, SIZE, 4)
    qkvz, grads = rand(2, TOKENS, 2 * KV_HEADS * 3 * SIZE).unbind()
    (q, k, v, z), (dq, dk, dv, dz) = views(qkvz, sizes, False), views(grads, sizes, False)
    b, a = rand(TOKENS, KV_HEADS, 4).split(2, 2)
    weight, norm, total, norm_total = rand(sizes.channels, 1, 4), rand(SIZE), zeros(sizes.channels, 1, 4), zeros(SIZE)
    a_log, dt_bias, log_total, bias_total = zeros(4, HEADS)
    positions = torch.arange(TOKENS, device="cuda")

    def run() -> None:
        inputs = causal_conv.causal_conv(q, k, v, weight, positions)
        causal_conv.causal_conv_backward(*inputs, q, k, v, weight, positions, (dq, dk, dv), total)
        decay, beta = delta_gates.gates(b, a, a_log, dt_bias)
        delta_gates.gates_backward(decay, beta, b, a, a_log, dt_bias, (b, a), (log_total, bias_total))
        x = inputs[2].view(TOKENS, HEADS, SIZE)
        y = gated_norm.gated_norm(x, z, norm, 1e-6)
        gated_norm.gated_norm_backward(y, x, z, norm, 1e-6, dz, norm_total)

    return run


def products_of_experts(rand: Rand, *, width: int) -> Run:
    x, w, bias, dy = rand(TOKENS, WIDTH), rand(EXPERTS, WIDTH, width), rand(EXPERTS, width), rand(TOKENS, width)
    ends = torch.tensor([7, 7, 30, 31, TOKENS], dtype=torch.int32, device="cuda")
    total, bias_total = zeros(EXPERTS, WIDTH, width), zeros(EXPERTS, width)

    def run() -> None:
        grouped.grouped_mm(x, w, ends)
        grouped.grouped_mm(x, w, ends, bias)
        grouped.grouped_mm(dy, w.mT, ends)
        grouped.grouped_weight_grad(total, x, dy, ends)
        grouped.grouped_bias_grad(bias_total, dy, ends)

    return run


def products_of_experts_in_fp8(rand: Rand, *, by_input: bool) -> Run:
    """On GPUs with FP8; experts have as many inputs as outputs."""
    x, w, bias, dy = rand(TOKENS, WIDTH), rand(EXPERTS, WIDTH, WIDTH), rand(EXPERTS, WIDTH), rand(TOKENS, WIDTH)
    ends = torch.tensor([7, 7, 30, 31, TOKENS], dtype=torch.int32, device="cuda")
    rows, total = fp8.quantize_rows(w.flatten(0, 1)), zeros(EXPERTS, WIDTH, WIDTH)
    codes = rows.codes.view(w.shape)
    weight = fp8.FP8Weight(fp8.Rows(codes, rows.scales.view(EXPERTS, WIDTH)), fp8.transpose(codes), by_input)
    perm = moe.permute(moe.choose(rand(TOKENS // ACTIVE, EXPERTS), ACTIVE), EXPERTS)

    def run() -> None:
        weight.write(w if by_input else w.flatten(0, 1))
        grouped_fp8.gather_codes(fp8.quantize_rows(x[: TOKENS // ACTIVE]), perm)
        grouped_fp8.grouped_mm(x, weight, ends, bias, x.dtype)
        grouped_fp8.grouped_mm_transposed(dy, weight, ends)
        grouped_fp8.grouped_weight_grad(total, x, dy, ends, by_input=by_input)

    return run


def routing(rand: Rand) -> Run:
    logits, counted = rand(TOKENS, EXPERTS), torch.arange(TOKENS, device="cuda") % 3 > 0
    count, correction = counted.sum(), rand(4).float()

    def run() -> None:
        for groups, reached in ((1, 1), (2, 1)):
            moe.choose(moe.choice_scores(logits[:, :4], correction, groups, reached), ACTIVE)
        choice = moe.choose(logits, ACTIVE)
        moe.permute(choice, EXPERTS)
        for kept, number in ((None, TOKENS), (counted, count)):
            dprobs = moe.balance_grad(moe.expert_counts(choice, EXPERTS, kept), number, 0.01)
            for scoring in itertools.starmap(moe.Scoring, itertools.product((True, False), (True, False))):
                weights = moe.route(logits, choice, scoring)
                moe.route_backward(weights, logits, choice, scoring)
                moe.route_backward(weights, logits, choice, scoring, dprobs, kept)

    return run


def rows_of_experts(rand: Rand) -> Run:
    x, weights = rand(TOKENS, WIDTH), rand(TOKENS, ACTIVE)
    dact, act = rand(2, TOKENS * ACTIVE, WIDTH).unbind()
    perm = moe.permute(moe.choose(rand(TOKENS, EXPERTS), ACTIVE), EXPERTS)

    def run() -> None:
        by_expert = moe_rows.gather(x, perm)
        moe_rows.combine(by_expert, perm)
        moe_rows.combine(by_expert, perm, weights)
        moe_rows.combine_backward(x, by_expert, perm, weights)
        moe_rows.router_weight_grad(dact, act, perm, weights)

    return run


def products(rand: Rand) -> Run:
    x, w, dy, total = rand(TOKENS, WIDTH), rand(SIZE, WIDTH), rand(TOKENS, SIZE), zeros(SIZE, WIDTH)

    def run() -> None:
        linear.linear(x, w)
        linear.linear_add(x, w, dy)
        linear.linear_add(x, w, dy, overwrite=True)
        linear.linear_backward_input(dy, w)
        linear.accumulate_weight_grad(total, dy, x)

    return run


def dropped(rand: Rand) -> Run:
    x, out, drop = rand(TOKENS, WIDTH), rand(TOKENS, WIDTH), mask()

    def run() -> None:
        dropout(x, drop)
        add_dropout(out, x, drop)

    return run


def mask() -> Dropout:
    return Dropout(0.1, torch.tensor([1, 2, 3], device="cuda"), TOKENS // 2, 4, 5)


def adapters(rand: Rand, *, masked: bool) -> Run:
    ranks, starts = (4, 8), (0, SIZE)
    x, dx = rand(2, TOKENS, WIDTH).unbind()
    y, dy = rand(2, TOKENS, 2 * SIZE).unbind()
    a, b = rand(sum(ranks), WIDTH), [rand(SIZE, rank) for rank in ranks]
    grad_a, grad_b = zeros(sum(ranks), WIDTH), [zeros(SIZE, rank) for rank in ranks]
    drop = mask() if masked else None

    def run() -> None:
        lora.add_lora(y, x, a, b, starts, 2.0, drop)
        dh = lora.lora_backward_input(dy, a, b, starts, 2.0, drop, dx)
        lora.lora_backward_weights(dy, dh, x, a, starts, 2.0, drop, grad_a, grad_b)

    return run


def adapters_of_experts(rand: Rand) -> Run:
    ranks, ends = EXPERTS * 8, torch.tensor([0, 9, 9, 40, TOKENS], dtype=torch.int32, device="cuda")
    (x, dx), (y, dy) = rand(2, TOKENS, WIDTH).unbind(), rand(2, TOKENS, SIZE).unbind()
    a, b, grad_a, grad_b = rand(ranks, WIDTH), rand(SIZE, ranks), zeros(ranks, WIDTH), zeros(SIZE, ranks)

    def run() -> None:
        grouped_lora.add_grouped_lora(y, x, a, b, ends, 2.0)
        dh = grouped_lora.grouped_lora_backward_input(dy, a, b, ends, 2.0, dx)
        grouped_lora.grouped_lora_backward_weights(dy, dh, x, a, ends, 2.0, grad_a, grad_b)

    return run


def dequantizing(rand: Rand) -> Run:
    out = rand(TOKENS, WIDTH)
    formats = (*quant.FORMATS.values(), quant.fp8_format(out.shape[-1]))
    stored = {fmt: [part.cuda() for part in quant.quantize(out.cpu(), fmt)] for fmt in formats}

    def run() -> None:
        for fmt, (codes, scales) in stored.items():
            quant.dequantize(codes, scales, fmt, out)

    return run


OPS: dict[str, Callable[..., Run]] = {
    "norms": norms,
    "delta_net": delta_net,
    "rotation": rotation,
    "gated attention": gated_attention,
    "activation": activation,
    "experts": partial(products_of_experts, width=64),
    "experts, odd": partial(products_of_experts, width=33),
    "routing": routing,
    "rows of experts": rows_of_experts,
    "products": products,
    "dropout": dropped,
    "adapters": partial(adapters, masked=False),
    "adapters, dropout": partial(adapters, masked=True),
    "adapters of experts": adapters_of_experts,
    "dequantizing": dequantizing,
}


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("by_input", [False, True], ids=["by_output", "by_input"])
def test_products_of_experts_in_fp8_never_wait(by_input, dtype) -> None:
    if not read().has_fp8:
        pytest.skip("the GPU has no FP8")
    check(products_of_experts_in_fp8(lambda *shape: random(shape, dtype, "cuda"), by_input=by_input))


def check(run: Run) -> None:
    run()
    with waits_are_errors():
        run()


@pytest.mark.gpu
def test_a_wait_is_seen() -> None:
    one = torch.ones(1, device="cuda")
    with waits_are_errors(), pytest.raises(RuntimeError, match="synchron"):
        one.item()


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("op", OPS)
def test_cuda_never_waits(op, dtype) -> None:
    check(OPS[op](lambda *shape: random(shape, dtype, "cuda")))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(("documents", "window"), [([[5, 19], [24]], None), ([[24], [24]], None), ([[5, 19], [24]], 7)])
def test_attention_never_waits(documents, window, dtype, micro_batch) -> None:
    """With a window there are sinks too."""
    mb = micro_batch(documents, "cuda")
    inputs = heads(random((TOKENS, QKV), dtype, "cuda"))
    into = heads(random((TOKENS, QKV), dtype, "cuda"))
    dout = random((TOKENS, HEADS, SIZE), dtype, "cuda")
    extras = {} if window is None else {"window": window, "sinks": random((HEADS,), dtype, "cuda")}
    total = None if window is None else zeros(HEADS)

    def run() -> None:
        out, saved = attention(*inputs, mb, **extras)
        attention_backward(dout, *inputs, out, saved, mb, **extras, grad_sinks=total, into=into)

    check(run)
