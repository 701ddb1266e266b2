"""Grouped products in FP8: rows sorted by expert, each times its expert's weight; gradients of the weights.

Suffixes as in kernels/reference/moe.py. kernels/fp8.py has the rules of quantization and of sums. The scales of a
weight's rows [E, N] belong to outputs, or to inputs (`FP8Weight.by_input`): in the product along them they are
multiplied into the other operand, whose rows each belong to one expert, before it is quantized.

A weight's gradient sums over the rows of an expert, which are columns there. Operands are therefore transposed into
segments of P columns in total: an expert's segment begins at a multiple of SEGMENT, and zeros fill its last block.
Where segments end is known on the device only; P follows from the number of rows.
"""

from typing import Any

import torch
from torch import Tensor

from rptrain.kernels import fp8, fp8_products
from rptrain.kernels.fp8 import FP8, FP8Weight, Rows
from rptrain.kernels.fp8_products import TERMS
from rptrain.kernels.launch import HAS_TRITON, fused, jit, power_of_2, tl, triton
from rptrain.kernels.moe import Permutation
from rptrain.kernels.moe_rows import gather
from rptrain.kernels.reference import grouped_fp8 as reference
from rptrain.kernels.target import Target, target_of

SEGMENT = TERMS  # columns of a block in the segments of experts


def grouped_mm(x: Tensor | Rows, w: FP8Weight, ends_E: Tensor, bias_EM: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of expert e, which end at ends_E[e], times its weight, plus bias_EM[e] where given: [N, M], rounded once.

    `x` [N, K] may be quantized by rows already, where the rows of the weight are outputs.
    """
    if not w.by_input:
        return _along_rows(x, w, ends_E, bias_EM, dtype)
    assert isinstance(x, Tensor)
    return _across_rows(x, w, ends_E, bias_EM)


def grouped_mm_transposed(dy_NM: Tensor, w: FP8Weight, ends_E: Tensor) -> Tensor:
    """The gradient [N, K] of the input of `grouped_mm`."""
    if w.by_input:
        return _along_rows(dy_NM, w, ends_E, None, dy_NM.dtype)
    return _across_rows(dy_NM, w, ends_E, None)


def _along_rows(x: Tensor | Rows, w: FP8Weight, ends: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows = quantize_rows(x, None, ends) if isinstance(x, Tensor) else x
    return product(rows, *w.rows, ends, bias, dtype)


def _across_rows(x: Tensor, w: FP8Weight, ends: Tensor, bias: Tensor | None) -> Tensor:
    assert w.columns is not None
    return product(quantize_rows(x, w.rows.scales, ends), w.columns, None, ends, bias, x.dtype)


def grouped_weight_grad(
    acc: Tensor | None, x: Tensor | Rows, dy_NM: Tensor, ends_E: Tensor, *, by_input: bool = False
) -> None:
    """Adds the gradient of each expert's weight to its part of `acc`, float32: [E, M, K], or `by_input` [E, K, M].

    Of the two operands, that of the accumulator's columns is quantized by rows; their scales are multiplied into the
    other one, whose columns are quantized for each expert. `x` [N, K] may be quantized by rows already, if not
    `by_input`. None: nothing is computed; without rows a part is untouched.
    """
    if acc is None:
        return
    a, b = (x, dy_NM) if by_input else (dy_NM, x)
    assert isinstance(a, Tensor)
    codes, scales = quantize_rows(b, None, ends_E) if isinstance(b, Tensor) else b
    turned = transpose(codes, ends_E)
    del codes
    accumulate(acc, quantize_columns(a, scales, ends_E), turned, ends_E)


def gather_codes(x_TD: Rows, perm: Permutation) -> Rows:
    """The tokens' rows by expert; D is even."""
    codes = gather(x_TD.codes.view(torch.bfloat16), perm).view(FP8)  # moved, not computed with
    return Rows(codes, x_TD.scales.index_select(0, perm.order // perm.places.shape[1]))


def length(rows: int, experts: int) -> int:
    """Columns of all segments, at most: P."""
    return SEGMENT * ((rows + (SEGMENT - 1) * min(rows, experts)) // SEGMENT)


def workspace(rows: int, experts: int, inputs: int, outputs: int, *, largest: int, fused: bool) -> int:
    """Upper bound of the bytes that the gradients of a product [rows, inputs] to [rows, outputs] need at once.

    These are the codes of one operand by rows, and of both in segments. The reference operations also upcast the
    operands of one expert, which has `largest` rows at most.
    """
    scales = 8 * rows + 8 * experts * max(inputs, outputs)
    codes = rows * max(inputs, outputs) + length(rows, experts) * (inputs + outputs)
    if fused:
        return scales + codes
    quantized = 12 * largest * max(inputs, outputs)
    multiplied = 4 * largest * (inputs + 2 * outputs) + 8 * inputs * outputs
    return scales + codes + max(quantized, multiplied)


def quantize_rows(x_NK: Tensor, factors_EK: Tensor | None, ends_E: Tensor) -> Rows:
    """The rows of x, whose columns are multiplied by their expert's factors first, where given."""
    if fused(x_NK):
        if factors_EK is None:
            return fp8.quantize_rows(x_NK)
        return quantize_rows_triton(x_NK, factors_EK, ends_E)
    return Rows(*reference.quantize_rows(x_NK, factors_EK, ends_E))


def quantize_columns(x_NM: Tensor, factors_N: Tensor, ends_E: Tensor) -> Rows:
    """The columns of each expert's rows, multiplied by `factors_N` first, in segments: codes [M, P], scales [E, M]."""
    if fused(x_NM):
        return quantize_columns_triton(x_NM, factors_N, ends_E)
    size = length(len(x_NM), len(ends_E))
    return Rows(*reference.quantize_columns(x_NM, factors_N, ends_E, size, SEGMENT))


def transpose(codes_NK: Tensor, ends_E: Tensor) -> Tensor:
    """The codes of each expert's rows as columns, in segments: [K, P]."""
    if _on_gpu(codes_NK):
        return transpose_triton(codes_NK, ends_E)
    return reference.transpose(codes_NK, ends_E, length(len(codes_NK), len(ends_E)), SEGMENT)


def product(
    a: Rows, b_EMK: Tensor, scales_EM: Tensor | None, ends_E: Tensor, bias_EM: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The rows of A [N, K] times their expert's transposed codes, plus its bias, rounded once to `dtype`: [N, M]."""
    if _on_gpu(a.codes):
        return product_triton(a, b_EMK, scales_EM, ends_E, bias_EM, dtype)
    return reference.product(*a, b_EMK, scales_EM, ends_E, bias_EM, dtype)


def accumulate(acc_EMK: Tensor, a: Rows, b_KP: Tensor, ends_E: Tensor) -> None:
    """Adds to each expert's part the product of A's segment with that of the codes b, both of `ends_E`."""
    if _on_gpu(b_KP):
        return accumulate_triton(acc_EMK, a, b_KP, ends_E)
    return reference.accumulate(acc_EMK, *a, b_KP, ends_E, SEGMENT)


def _on_gpu(codes: Tensor) -> bool:
    return HAS_TRITON and codes.is_cuda


def quantize_rows_triton(x_NK: Tensor, factors_EK: Tensor, ends_E: Tensor) -> Rows:
    """`quantize_rows` as a kernel; rows of x are contiguous."""
    count, size = x_NK.shape
    codes = x_NK.new_empty(count, size, dtype=torch.uint8).view(FP8)
    scales = x_NK.new_empty(count, dtype=torch.float32)
    if count:
        _grouped_rows_kernel[(count,)](
            x_NK, factors_EK, codes, scales, ends_E, len(ends_E), SIZE=size, STRIDE=x_NK.stride(0),
            EXPERTS=power_of_2(len(ends_E)), **fp8.row_block(size),
        )  # fmt: skip
    return Rows(codes, scales)


def quantize_columns_triton(x_NM: Tensor, factors_N: Tensor, ends_E: Tensor) -> Rows:
    """`quantize_columns` as two kernels, which both read x; its rows are contiguous."""
    (count, size), experts = x_NM.shape, len(ends_E)
    blocks = length(count, experts) // SEGMENT
    codes = x_NM.new_empty(size, blocks * SEGMENT, dtype=torch.uint8).view(FP8)
    scales = x_NM.new_empty(experts, size, dtype=torch.float32)
    maxima = torch.zeros(experts, size, dtype=torch.int32, device=x_NM.device)
    if count:
        grid, options = _by_block(blocks, size, experts)
        stride = x_NM.stride(0)
        _grouped_maxima_kernel[grid](x_NM, factors_N, maxima, ends_E, experts, STRIDE=stride, **options)
        _grouped_codes_kernel[grid](
            x_NM, factors_N, maxima, codes, scales, ends_E, experts, blocks, STRIDE=stride, **options
        )
    return Rows(codes, scales)


def transpose_triton(codes_NK: Tensor, ends_E: Tensor) -> Tensor:
    """`transpose` as a kernel, of contiguous codes."""
    (count, size), experts = codes_NK.shape, len(ends_E)
    blocks = length(count, experts) // SEGMENT
    out = codes_NK.new_empty(size, blocks * SEGMENT, dtype=torch.uint8)
    if count:
        grid, options = _by_block(blocks, size, experts)
        _grouped_transpose_kernel[grid](codes_NK.view(torch.uint8), out, ends_E, experts, blocks, **options)
    return out.view(FP8)


def _by_block(blocks: int, size: int, experts: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Launches with a program for 64 columns of a block."""
    constants = {"SIZE": size, "EXPERTS": power_of_2(experts), "ROWS": SEGMENT, "COLUMNS": 64}
    return (blocks, triton.cdiv(size, 64)), constants | {"num_warps": 8}


def product_triton(
    a: Rows, b_EMK: Tensor, scales_EM: Tensor | None, ends_E: Tensor, bias_EM: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`product` as a kernel; all tensors are contiguous."""
    experts, columns, inner = b_EMK.shape
    out = torch.empty(len(a.codes), columns, dtype=dtype, device=b_EMK.device)
    constants = product_constants(inner, target_of(out.device))
    # every expert may end in a tile of its own that is not full
    tiles = triton.cdiv(len(out), constants["ROWS"]) + experts
    if len(out):
        _grouped_product_kernel[(tiles * triton.cdiv(columns, constants["COLUMNS"]),)](
            out, *a, b_EMK, scales_EM, bias_EM, ends_E, experts, K=inner, M=columns,
            B_SCALES=scales_EM is not None, BIAS=bias_EM is not None, EXPERTS=power_of_2(experts), **constants,
        )  # fmt: skip
    return out


def accumulate_triton(acc_EMK: Tensor, a: Rows, b_KP: Tensor, ends_E: Tensor) -> None:
    """`accumulate` as a kernel; codes and accumulator are contiguous."""
    experts, rows, columns = acc_EMK.shape
    constants = product_constants(SEGMENT, target_of(acc_EMK.device))
    blocks = b_KP.shape[1] // SEGMENT
    if blocks:
        tiles = triton.cdiv(rows, constants["ROWS"]) * triton.cdiv(columns, constants["COLUMNS"])
        _grouped_accumulate_kernel[(experts * tiles,)](
            acc_EMK, *a, b_KP, ends_E, experts, blocks, R=rows, C=columns, EXPERTS=power_of_2(experts), **constants
        )


def product_constants(inner: int, target: Target) -> dict[str, Any]:
    """Constants and options of a product with this inner size: as in kernels/fp8.py, or with fewer terms at a time."""
    terms = TERMS if inner % TERMS == 0 or inner % 64 else 64
    tiles = fp8_products.tiles(inner % terms == 0, target)
    return {
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "TERMS": terms, "LIMIT": fp8_products.limit(terms, target),
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


@jit
def _blocks(ends, experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """The experts' numbers, where their rows begin and end, and how many blocks of rows they have."""
    numbers = tl.arange(0, EXPERTS)
    stops = tl.load(ends + numbers, mask=numbers < experts, other=0)
    begins = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < experts), other=0)
    return numbers, begins, stops, (stops - begins + ROWS - 1) // ROWS


@jit
def _block(ends, experts, block, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """A block's expert, its first row, the end of the expert's rows, and the expert's first block.

    The blocks of experts follow one another; after the last one, the first row is not before the end.
    """
    numbers, begins, stops, counts = _blocks(ends, experts, ROWS, EXPERTS)
    after = tl.cumsum(counts, 0)
    expert = tl.sum((after <= block).to(tl.int32), 0)
    here = numbers == expert
    start = tl.sum(tl.where(here, after - counts, 0), 0)
    first = tl.sum(tl.where(here, begins, 0), 0) + (block - start) * ROWS
    return expert, first, tl.sum(tl.where(here, stops, 0), 0), start


@jit
def _grouped_rows_kernel(
    x, factors, codes, scales, ends, experts,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A row that is longer than a block is read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, EXPERTS)
    stops = tl.load(ends + numbers, mask=numbers < experts, other=2147483647)
    factors += tl.sum((stops <= row).to(tl.int32), 0).to(tl.int64) * SIZE
    x += row * STRIDE
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        largest = tl.maximum(largest, fp8.magnitude(fp8._part(x, factors, start, SIZE, BLOCK, True)))
    scale = fp8.scale_of(tl.max(largest, 0))
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        code = fp8.encode(fp8._part(x, factors, start, SIZE, BLOCK, True), scale)
        tl.store(codes + row * SIZE + columns, code, mask=columns < SIZE)
    tl.store(scales + row, scale)


@jit
def _multiplied(x, factors, rows, columns, stop, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    return fp8._by_row(fp8._tile(x, rows, columns, stop, SIZE, STRIDE), factors, rows, stop, True)


@jit
def _grouped_maxima_kernel(
    x, factors, maxima, ends, experts, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The bits of the largest magnitude of each column of each expert."""
    expert, first, stop, _ = _block(ends, experts, tl.program_id(0), ROWS, EXPERTS)
    if first >= stop:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = _multiplied(x, factors, first + tl.arange(0, ROWS), columns, stop, SIZE, STRIDE)
    at = maxima + expert * SIZE + columns
    tl.atomic_max(at, tl.max(fp8.magnitude(values), 0), mask=columns < SIZE, sem="relaxed")


@jit
def _grouped_codes_kernel(
    x, factors, maxima, codes, scales, ends, experts, blocks, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, first, stop, start = _block(ends, experts, tl.program_id(0), ROWS, EXPERTS)
    if first >= stop:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = _multiplied(x, factors, first + tl.arange(0, ROWS), columns, stop, SIZE, STRIDE)
    scale = fp8.scale_of(tl.load(maxima + expert * SIZE + columns, mask=columns < SIZE, other=0))
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = codes + columns.to(tl.int64)[:, None] * (blocks * ROWS) + places[None, :]
    tl.store(at, tl.trans(fp8.encode(values, scale[None, :])), mask=(columns < SIZE)[:, None])
    if tl.program_id(0) == start:
        tl.store(scales + expert * SIZE + columns, scale, mask=columns < SIZE)


@jit
def _grouped_transpose_kernel(
    codes, out, ends, experts, blocks,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    _, first, stop, _ = _block(ends, experts, tl.program_id(0), ROWS, EXPERTS)
    if first >= stop:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < stop)[:, None] & (columns < SIZE)[None, :]
    tile = tl.load(codes + rows.to(tl.int64)[:, None] * SIZE + columns[None, :], mask=inside, other=0)
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = out + columns.to(tl.int64)[:, None] * (blocks * ROWS) + places[None, :]
    tl.store(at, tl.trans(tile), mask=(columns < SIZE)[:, None])


@jit
def _grouped_product_kernel(
    out, a, a_scales, b, b_scales, bias, ends, experts, K: tl.constexpr, M: tl.constexpr,
    B_SCALES: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(M, COLUMNS)
    expert, first, stop, _ = _block(ends, experts, tl.program_id(0) // across, ROWS, EXPERTS)
    if first >= stop:
        return
    mine = first + tl.arange(0, ROWS)
    theirs = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, TERMS)
    a_at = a + mine.to(tl.int64)[:, None] * K + depth[None, :]
    b_at = b + expert.to(tl.int64) * (M * K) + theirs[None, :] * K + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, TERMS):
        if K % TERMS == 0:
            left = tl.load(a_at, mask=(mine < stop)[:, None], other=0.0)
            right = tl.load(b_at, mask=(theirs < M)[None, :], other=0.0)
        else:
            inside = depth < K - start
            left = tl.load(a_at, mask=(mine < stop)[:, None] & inside[None, :], other=0.0)
            right = tl.load(b_at, mask=inside[:, None] & (theirs < M)[None, :], other=0.0)
        total += tl.dot(left, right, max_num_imprecise_acc=LIMIT)
        a_at += TERMS
        b_at += TERMS
    total *= tl.load(a_scales + mine, mask=mine < stop, other=0.0)[:, None]
    if B_SCALES:
        total *= tl.load(b_scales + expert * M + theirs, mask=theirs < M, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + expert * M + theirs, mask=theirs < M, other=0.0).to(tl.float32)[None, :]
    at = out + mine.to(tl.int64)[:, None] * M + theirs[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(mine < stop)[:, None] & (theirs < M)[None, :])


@jit
def _grouped_accumulate_kernel(
    acc, a, a_scales, b, ends, experts, blocks, R: tl.constexpr, C: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(C, COLUMNS)
    tiles = tl.cdiv(R, ROWS) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    numbers, _, _, counts = _blocks(ends, experts, TERMS, EXPERTS)
    count = tl.sum(tl.where(numbers == expert, counts, 0), 0)
    if count == 0:
        return
    start = tl.sum(tl.where(numbers < expert, counts, 0), 0)
    mine = (tile // across) * ROWS + tl.arange(0, ROWS)
    theirs = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = start * TERMS + tl.arange(0, TERMS)
    a_at = a + mine.to(tl.int64)[:, None] * (blocks * TERMS) + depth[None, :]
    b_at = b + theirs.to(tl.int64)[None, :] * (blocks * TERMS) + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(count):
        left = tl.load(a_at, mask=(mine < R)[:, None], other=0.0)
        right = tl.load(b_at, mask=(theirs < C)[None, :], other=0.0)
        total += tl.dot(left, right, max_num_imprecise_acc=LIMIT)
        a_at += TERMS
        b_at += TERMS
    total *= tl.load(a_scales + expert * R + mine, mask=mine < R, other=0.0)[:, None]
    at = acc + expert.to(tl.int64) * (R * C) + mine.to(tl.int64)[:, None] * C + theirs[None, :]
    inside = (mine < R)[:, None] & (theirs < C)[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)
