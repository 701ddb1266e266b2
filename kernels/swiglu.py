"""SwiGLU on the fused product of gate and up, plain and in GPT-OSS's clamped form, and its backward.

The activation is rounded where Hugging Face's modelling code rounds it; gradients are rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.launch import fused, power_of_2, tl, triton
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.reference.dense import Clamp

__all__ = ["Clamp", "swiglu", "swiglu_backward"]

BLOCK = 1024  # columns of a program, 8 for each thread of 4 warps


def swiglu(gate_up: Tensor, *, interleaved: bool = False, clamp: Clamp | None = None) -> Tensor:
    """silu(gate) * up [T, I] of the product [T, 2I]: gate first, or `interleaved` gate, up, gate, up.

    With `clamp`: (up + 1) * gate * sigmoid(alpha * gate), gate and up held to the limit before (GPT-OSS).
    """
    if not fused(gate_up):
        return reference.swiglu(gate_up, interleaved, clamp)
    return swiglu_triton(gate_up, interleaved, clamp)


def swiglu_backward(
    dy: Tensor,
    gate_up: Tensor,
    out: Tensor | None = None,
    activation: Tensor | None = None,
    *,
    interleaved: bool = False,
    clamp: Clamp | None = None,
) -> Tensor:
    """The gradient [T, 2I] of the product, laid out as that is, in `out` where given: it may be gate_up itself.

    `activation` [T, I] receives what `swiglu` returned, to the bit; it may be dy itself.
    """
    if not fused(gate_up):
        return reference.swiglu_backward(dy, gate_up, out, activation, interleaved, clamp)
    return swiglu_backward_triton(dy, gate_up, out, activation, interleaved, clamp)


def swiglu_triton(gate_up: Tensor, interleaved: bool, clamp: Clamp | None) -> Tensor:
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid, options = _launch(tokens, size, interleaved, clamp)
        _forward[grid](gate_up, out, **options)
    return out


def swiglu_backward_triton(
    dy: Tensor,
    gate_up: Tensor,
    out: Tensor | None,
    activation: Tensor | None,
    interleaved: bool,
    clamp: Clamp | None,
) -> Tensor:
    out = torch.empty_like(gate_up) if out is None else out
    assert all(x is None or x.is_contiguous() for x in (dy, gate_up, out, activation))
    if dy.numel():
        grid, options = _launch(dy.shape[0], dy.shape[1], interleaved, clamp)
        options["ACTIVATION"] = activation is not None
        _backward[grid](dy, gate_up, out, dy if activation is None else activation, **options)
    return out


def _launch(tokens: int, size: int, interleaved: bool, clamp: Clamp | None) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the constants that both kernels take."""
    block = min(BLOCK, power_of_2(size))
    alpha, limit = clamp or Clamp()
    return (tokens, triton.cdiv(size, block)), {
        "alpha": alpha,
        "limit": limit,
        "SIZE": size,
        "BLOCK": block,
        "INTERLEAVED": interleaved,
        "CLAMPED": clamp is not None,
        "num_warps": max(1, block // 256),
    }


@triton.jit
def _load(gate_up, row, start, SIZE: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up of some columns of a row, in float32."""
    base = gate_up + row * (2 * SIZE)
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        values = tl.load(base + both, mask=both < 2 * SIZE, other=0).to(tl.float32)
        gate, up = tl.split(tl.reshape(values, (BLOCK, 2)))
    else:
        columns = start + tl.arange(0, BLOCK)
        gate = tl.load(base + columns, mask=columns < SIZE, other=0).to(tl.float32)
        up = tl.load(base + SIZE + columns, mask=columns < SIZE, other=0).to(tl.float32)
    return gate, up


@triton.jit
def _hold(gate, up, limit):
    """Comparisons rather than minima, so that NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


@triton.jit
def _activation(gate, up, alpha, dtype: tl.constexpr, CLAMPED: tl.constexpr):
    """The activation of clamped values; every operation of the model's code rounds to `dtype`."""
    if CLAMPED:
        share = tl.sigmoid((gate * alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        product = (gate * share).to(dtype).to(tl.float32) * (up + 1).to(dtype).to(tl.float32)
    else:
        product = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    return product.to(dtype)


@triton.jit
def _forward(
    gate_up, out, alpha, limit,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    gate, up = _load(gate_up, row, start, SIZE, BLOCK, INTERLEAVED)
    if CLAMPED:
        gate, up = _hold(gate, up, limit)
    columns = start + tl.arange(0, BLOCK)
    product = _activation(gate, up, alpha, out.dtype.element_ty, CLAMPED)
    tl.store(out + row * SIZE + columns, product, mask=columns < SIZE)


@triton.jit
def _backward(
    dy, gate_up, out, activation, alpha, limit,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Reads all that it overwrites first: out may be gate_up, and activation dy."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = out.dtype.element_ty
    stored_gate, stored_up = _load(gate_up, row, start, SIZE, BLOCK, INTERLEAVED)
    dout = tl.load(dy + row * SIZE + columns, mask=inside, other=0).to(tl.float32)
    gate, up = stored_gate, stored_up
    if CLAMPED:
        gate, up = _hold(gate, up, limit)
        share = tl.sigmoid(gate * alpha)
        dgate = dout * (up + 1) * share * (1 + alpha * gate * (1 - share))
        dgate = tl.where(stored_gate > limit, 0, dgate)
        dup = tl.where(tl.abs(stored_up) > limit, 0, dout * gate * share)
    else:
        share = tl.sigmoid(gate)
        dgate = dout * up * share * (1 + gate * (1 - share))
        dup = dout * gate * share
    if ACTIVATION:
        product = _activation(gate, up, alpha, dtype, CLAMPED)
        tl.debug_barrier()  # does not depend on dy: no warp may write over what another has yet to read
        tl.store(activation + row * SIZE + columns, product, mask=inside)
    base = out + row * (2 * SIZE)
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(base + both, tl.interleave(dgate, dup).to(dtype), mask=both < 2 * SIZE)
    else:
        tl.store(base + columns, dgate.to(dtype), mask=inside)
        tl.store(base + SIZE + columns, dup.to(dtype), mask=inside)
