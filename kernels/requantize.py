"""Frozen weights in NF4, MXFP4 or int8 to FP8 (e4m3) with a scale for each row, without a 16-bit copy in between.

Weights are rounded to the model's type before they are quantized, so the bits are those of `Quantized.dequantize`
followed by `FP8Weight.write`.
"""

import math
from typing import Any

import torch

from rptrain.kernels import fp8
from rptrain.kernels.fp8 import FP8Weight, Rows, encode, magnitude, scale_of
from rptrain.kernels.fp8_host import quantize_rows_into
from rptrain.kernels.launch import jit, tl
from rptrain.kernels.quant import CHUNK, MXFP4, Format, Quantized, decode_4bit, power_of_2_scale, table


def requantize(held: Quantized, weight: FP8Weight, dtype: torch.dtype) -> None:
    """Writes the held weights, rounded to `dtype`, to the codes and scales of `weight`, and its transposed codes.

    The rows of `weight` [N, K], or of its experts [E, N, K], lie one after the other as they are held.
    """
    codes, scales = weight.rows
    rows = Rows(codes.view(-1, codes.shape[-1]), scales.view(-1))
    if fp8.on_gpu(codes):
        requantize_triton(held, rows, dtype)
    else:
        _requantize_on_host(held, rows, dtype)
    weight.write_columns()


def _requantize_on_host(held: Quantized, out: Rows, dtype: torch.dtype) -> None:
    """Some rows at a time, in whole blocks."""
    count, size = out.codes.shape
    whole = held.format.block // math.gcd(held.format.block, size)  # rows that end with a block
    step = max(CHUNK // size // whole, 1) * whole
    for start in range(0, count, step):
        stop = min(start + step, count)
        values = torch.empty(stop - start, size, dtype=dtype)
        held.part(start * size, stop * size).dequantize(values)
        quantize_rows_into(values, Rows(out.codes[start:stop], out.scales[start:stop]))


def requantize_triton(held: Quantized, out: Rows, dtype: torch.dtype) -> None:
    """`requantize` as a kernel, without transposed codes."""
    count, size = out.codes.shape
    if count:
        values = table(held.format.name, out.codes.device) if held.format.bits == 4 else held.scales
        _kernel[(count,)](held.codes, held.scales, values, *out, **constants(held.format, size, dtype))


def constants(fmt: Format, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """The constants and options of the kernel for rows of this size."""
    return {
        "SIZE": size, "SHARED": fmt.block, "BITS": fmt.bits, "HIGH_FIRST": int(fmt.high_first),
        "EXPONENTS": fmt is MXFP4, "DTYPE": getattr(tl, str(dtype).removeprefix("torch.")), **fp8.row_block(size),
    }  # fmt: skip


@jit
def _kernel(
    codes, scales, table, out_codes, out_scales, SIZE: tl.constexpr,
    SHARED: tl.constexpr,  # weights that share a scale
    BITS: tl.constexpr, HIGH_FIRST: tl.constexpr, EXPONENTS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program. A row that is longer than a block is read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        values = _weights(
            codes, scales, table, row, start, SIZE, SHARED, BITS, HIGH_FIRST, EXPONENTS, DTYPE, BLOCK
        )  # fmt: skip
        largest = tl.maximum(largest, magnitude(values))
    scale = scale_of(tl.max(largest, 0))
    for start in range(0, SIZE, BLOCK):
        values = _weights(
            codes, scales, table, row, start, SIZE, SHARED, BITS, HIGH_FIRST, EXPONENTS, DTYPE, BLOCK
        )  # fmt: skip
        columns = start + tl.arange(0, BLOCK)
        tl.store(out_codes + row * SIZE + columns, encode(values, scale), mask=columns < SIZE)
    tl.store(out_scales + row, scale)


@jit
def _weights(
    codes, scales, table, row, start, SIZE: tl.constexpr, SHARED: tl.constexpr, BITS: tl.constexpr,
    HIGH_FIRST: tl.constexpr, EXPONENTS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some weights of a row, rounded to DTYPE, in float32; 0 after its end."""
    columns = start + tl.arange(0, BLOCK)
    inside = columns < SIZE
    first = row * SIZE
    block = first // SHARED  # the rest is small
    factor = tl.load(scales + block + ((first - block * SHARED).to(tl.int32) + columns) // SHARED, mask=inside, other=0)
    if EXPONENTS:
        factor = power_of_2_scale(factor)
    if BITS == 4:
        odd = (first & 1).to(tl.int32) + columns
        byte = tl.load(codes + first // 2 + odd // 2, mask=inside, other=0)
        values = tl.load(table + decode_4bit(byte, odd & 1, HIGH_FIRST)) * factor
    else:
        values = tl.load(codes + first + columns, mask=inside, other=0).to(tl.float32) * factor
    return tl.where(inside, values, 0.0).to(DTYPE).to(tl.float32)
