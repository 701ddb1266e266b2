"""The output gate of attention (Qwen3.5): out * sigmoid(gate), and its backward.

Gates lie between the queries in the fused product, [T, H, C] at a stride of two heads; their gradient replaces them.
The sigmoid and the result are rounded, as in Hugging Face's modelling code; gradients are rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from rptrain.kernels import fp8
from rptrain.kernels.fp8 import Form, Operand, encode, magnitude, scale_of
from rptrain.kernels.launch import fused, jit, power_of_2, tl, triton
from rptrain.kernels.reference import dense as reference

BLOCK = 1024  # columns of a program, 8 for each thread of 4 warps
LONGEST = 16384  # columns of a row that fit in registers


def output_gate(out_THC: Tensor, gate_THC: Tensor, form: Form) -> Operand:
    """out * sigmoid(gate), the input [T, H C] of a product, in `form`. `out` is contiguous."""
    if not fused(out_THC):
        return fp8.operand(reference.output_gate(out_THC, gate_THC), form)
    if form is Form.ROWS:
        return output_gate_rows_triton(out_THC, gate_THC)
    return fp8.operand(output_gate_triton(out_THC, gate_THC), form)


def output_gate_backward(dy: Tensor, out_THC: Tensor, gate_THC: Tensor) -> Tensor:
    """dout [T, H, C]. The gradient of the gate is written over it, and the product's input again over dy [T, H C]."""
    if not fused(out_THC):
        return reference.output_gate_backward(dy, out_THC, gate_THC)
    return output_gate_backward_triton(dy, out_THC, gate_THC)


def output_gate_triton(out_THC: Tensor, gate_THC: Tensor) -> Tensor:
    gated = torch.empty_like(out_THC).flatten(1)
    if gated.numel():
        grid, options = _launch(out_THC, gate_THC)
        _forward[grid](out_THC, gate_THC, gated, **options)
    return gated


def output_gate_rows_triton(out_THC: Tensor, gate_THC: Tensor) -> Operand:
    """`output_gate` in FP8 alone, as a kernel."""
    tokens, heads, head_size = out_THC.shape
    size = heads * head_size
    rows = fp8.empty(tokens, size, out_THC.device)
    if tokens:
        _forward_rows[(tokens,)](out_THC, gate_THC, *rows, **_layout(out_THC, gate_THC), **_row(size))
    return Operand(out_THC.dtype, rows=rows)


def output_gate_backward_triton(dy: Tensor, out_THC: Tensor, gate_THC: Tensor) -> Tensor:
    assert dy.is_contiguous()
    dout = torch.empty_like(out_THC)
    if dout.numel():
        grid, options = _launch(out_THC, gate_THC)
        _backward[grid](dy, out_THC, gate_THC, dout, **options)
    return dout


def _layout(out_THC: Tensor, gate_THC: Tensor) -> dict[str, Any]:
    """The columns of a row and of a head, and the strides of gates over tokens and heads."""
    assert out_THC.is_contiguous() and gate_THC.stride(2) == 1
    _, heads, size = out_THC.shape
    return {"SIZE": heads * size, "C": size, "GATE_ROW": gate_THC.stride(0), "GATE_HEAD": gate_THC.stride(1)}


def _launch(out_THC: Tensor, gate_THC: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    layout = _layout(out_THC, gate_THC)
    block = min(BLOCK, power_of_2(layout["SIZE"]))
    grid = len(out_THC), triton.cdiv(layout["SIZE"], block)
    return grid, layout | {"BLOCK": block, "num_warps": max(1, block // 256)}


def _row(size: int) -> dict[str, Any]:
    """A row in one program, up to 16,384 columns at a time, 16 per thread."""
    block = min(power_of_2(size), LONGEST)
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


@jit
def _gates(gate, row, columns, C: tl.constexpr, GATE_ROW: tl.constexpr, GATE_HEAD: tl.constexpr):
    """Where the gates of some columns of a row lie."""
    return gate + row * GATE_ROW + columns // C * GATE_HEAD + columns % C


@jit
def _gated(out, gate, dtype: tl.constexpr):
    """The result, rounded; the sigmoid is rounded before."""
    return (out * tl.sigmoid(gate).to(dtype).to(tl.float32)).to(dtype)


@jit
def _loaded(
    out, gate, row, columns,
    SIZE: tl.constexpr, C: tl.constexpr, GATE_ROW: tl.constexpr, GATE_HEAD: tl.constexpr,
):  # fmt: skip
    """The result of some columns of a row."""
    inside = columns < SIZE
    values = tl.load(out + row * SIZE + columns, mask=inside, other=0).to(tl.float32)
    gates = tl.load(_gates(gate, row, columns, C, GATE_ROW, GATE_HEAD), mask=inside, other=0).to(tl.float32)
    return _gated(values, gates, out.dtype.element_ty)


@jit
def _forward(
    out, gate, gated,
    SIZE: tl.constexpr, C: tl.constexpr, GATE_ROW: tl.constexpr, GATE_HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    result = _loaded(out, gate, row, columns, SIZE, C, GATE_ROW, GATE_HEAD)
    tl.store(gated + row * SIZE + columns, result, mask=columns < SIZE)


@jit
def _forward_rows(
    out, gate, codes, scales,
    SIZE: tl.constexpr, C: tl.constexpr, GATE_ROW: tl.constexpr, GATE_HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row that is longer than a block is read and computed twice, the second time from the cache."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first = _loaded(out, gate, row, columns, SIZE, C, GATE_ROW, GATE_HEAD).to(tl.float32)
    largest = magnitude(first)
    for start in range(BLOCK, SIZE, BLOCK):
        some = _loaded(out, gate, row, start + columns, SIZE, C, GATE_ROW, GATE_HEAD).to(tl.float32)
        largest = tl.maximum(largest, magnitude(some))
    scale = scale_of(tl.max(largest, 0))
    tl.store(codes + row * SIZE + columns, encode(first, scale), mask=columns < SIZE)
    for start in range(BLOCK, SIZE, BLOCK):
        some = _loaded(out, gate, row, start + columns, SIZE, C, GATE_ROW, GATE_HEAD).to(tl.float32)
        tl.store(codes + row * SIZE + start + columns, encode(some, scale), mask=start + columns < SIZE)
    tl.store(scales + row, scale)


@jit
def _backward(
    dy, out, gate, dout,
    SIZE: tl.constexpr, C: tl.constexpr, GATE_ROW: tl.constexpr, GATE_HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads the gate and dy before it overwrites them."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = dout.dtype.element_ty
    at, gate_at = row * SIZE + columns, _gates(gate, row, columns, C, GATE_ROW, GATE_HEAD)
    gradient = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
    values = tl.load(out + at, mask=inside, other=0).to(tl.float32)
    gates = tl.load(gate_at, mask=inside, other=0).to(tl.float32)
    share = tl.sigmoid(gates)
    tl.store(dout + at, (gradient * share).to(dtype), mask=inside)
    again = _gated(values, gates, dtype)
    tl.debug_barrier()  # not all results depend on dy and the gate: no warp may write over what another has yet to read
    tl.store(dy + at, again, mask=inside)
    tl.store(gate_at, (gradient * values * share * (1 - share)).to(dtype), mask=inside)
