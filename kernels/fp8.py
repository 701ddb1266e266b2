"""FP8 (e4m3) with a scale for each row: operands of products, and their quantization.

The largest value of a row becomes the code 448, and codes are rounded by one rule everywhere: to the nearest, ties to
even; NaN and infinities become NaN. Codes are therefore the same on every device.
"""

from enum import Flag, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels.launch import HAS_TRITON, fused, jit, power_of_2, tl, triton
from rptrain.kernels.reference import fp8 as reference

FP8 = torch.float8_e4m3fn
ALIGNMENT = 16  # codes: rows of transposed codes are padded to a multiple, which libraries need


class Rows(NamedTuple):
    """A matrix in FP8: row i is codes[i] * scales[i]."""

    codes: Tensor  # [N, K], float8_e4m3fn
    scales: Tensor  # [N], float32

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K], rounded once."""
        return (self.codes.float() * self.scales[:, None]).to(dtype)


class Form(Flag):
    """The forms in which a product reads its input: in the model's type, and in FP8."""

    PLAIN = auto()
    ROWS = auto()


class Operand(NamedTuple):
    """The input [T, in] of a product of a model of type `dtype`, in the forms that are needed."""

    dtype: torch.dtype
    plain: Tensor | None = None
    rows: Rows | None = None

    def in_fp8(self) -> Rows:
        if self.rows is not None:
            return self.rows
        assert self.plain is not None
        return quantize_rows(self.plain)


class Maxima(NamedTuple):
    """The largest magnitudes of rows and of columns, as the bits of float32 numbers (int32); None if not known.

    Columns or rows are multiplied by their factors before, as in `quantize_both`.
    """

    rows: Tensor | None = None  # [N]
    columns: Tensor | None = None  # [K]


class FP8Weight(NamedTuple):
    """A weight [out, in] in FP8, or the weights of E experts: codes [E, N, K] and scales [E, N]."""

    rows: Rows
    columns: Tensor | None  # the codes transposed, [in, out] or [E, K, N]: the gradient of an input needs them
    by_input: bool = False  # whether the rows are inputs, as those of GPT-OSS's experts are

    def part(self, rows: slice) -> "FP8Weight":
        """Some of the rows, without their transposed codes."""
        return FP8Weight(Rows(self.rows.codes[rows], self.rows.scales[rows]), None)

    def write(self, w: Tensor) -> None:
        """Quantizes w [out, in] into its tensors, or the weights of experts, [E * out, in] or [E, in, out]."""
        codes, scales = self.rows
        stored = w.mT if w.dim() == 3 and not self.by_input else w
        size = codes.shape[-1]
        quantize_rows(stored.view(-1, size), out=Rows(codes.view(-1, size), scales.view(-1)))
        self.write_columns()

    def write_columns(self) -> None:
        """Transposes the codes of its rows, if it has a place for them."""
        if self.columns is not None:
            transpose(self.rows.codes, out=self.columns)


def empty(rows: int, columns: int, device: torch.device) -> Rows:
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=device).view(FP8)
    return Rows(codes, torch.empty(rows, dtype=torch.float32, device=device))


def operand(x: Tensor, form: Form) -> Operand:
    """x [T, in] in the forms that a product reads."""
    plain, rows = Form.PLAIN in form, Form.ROWS in form
    return Operand(x.dtype, x if plain else None, quantize_rows(x) if rows else None)


def quantize_rows(x: Tensor, factors: Tensor | None = None, *, out: Rows | None = None) -> Rows:
    """The rows of x [N, K], whose columns are multiplied by `factors` [K] first."""
    if fused(x):
        return quantize_rows_triton(x, factors, out)
    found = Rows(*reference.quantize(x, factors))
    return found if out is None else Rows(out.codes.copy_(found.codes), out.scales.copy_(found.scales))


def quantize_columns(x: Tensor, factors: Tensor | None = None) -> Rows:
    """The columns of x [N, K], whose rows are multiplied by `factors` [N] first: codes [K, N], and scales [K].

    N is padded with zeros to a multiple of 16.
    """
    if fused(x):
        return quantize_both_triton(x, None, factors, rows=False)[1]
    return Rows(*reference.quantize(_padded(x.t()), None if factors is None else _padded(factors)))


def quantize_both(
    x: Tensor, column_factors: Tensor | None, row_factors: Tensor | None, maxima: Maxima | None = None
) -> tuple[Rows, Rows]:
    """`quantize_rows` with `column_factors`, and `quantize_columns` with `row_factors`, of one x [N, K].

    With `maxima`, of rows and of columns with these factors, x is read once.
    """
    if fused(x):
        return quantize_both_triton(x, column_factors, row_factors, maxima)
    return quantize_rows(x, column_factors), quantize_columns(x, row_factors)


def transposed(x: Operand, maxima: Maxima | None = None) -> Rows:
    """The codes of the rows of x [N, K], transposed as `transpose` does, [K, N], and the scales [N] of the rows.

    With `maxima` of the rows, a plain x is read once, and only the transposed codes are written.
    """
    if x.rows is None and x.plain is not None and maxima is not None and maxima.rows is not None:
        return quantize_transposed_triton(x.plain, maxima.rows)
    rows = x.in_fp8()
    return Rows(transpose(rows.codes), rows.scales)


def transpose(codes: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The codes [N, K] transposed and contiguous: [K, N], N padded with zeros to a multiple of 16.

    Those of experts, [E, N, K], are transposed one by one.
    """
    if on_gpu(codes):
        return transpose_triton(codes, out)
    found = _padded(codes.view(torch.uint8).mT).contiguous().view(FP8)
    return found if out is None else out.copy_(found)


def _padded(x: Tensor) -> Tensor:
    """Zeros after the last dimension, up to a multiple of 16."""
    return F.pad(x, (0, -x.shape[-1] % ALIGNMENT))


def on_gpu(codes: Tensor) -> bool:
    """Whether kernels run on these codes."""
    return HAS_TRITON and codes.is_cuda


def quantize_rows_triton(x: Tensor, factors: Tensor | None, out: Rows | None = None) -> Rows:
    """`quantize_rows` as a kernel; rows of x are contiguous."""
    count, size = x.shape
    out = empty(count, size, x.device) if out is None else out
    if count:
        _rows_kernel[(count,)](
            x, factors, *out, SIZE=size, STRIDE=x.stride(0), FACTORS=factors is not None, **row_block(size)
        )
    return out


def row_block(size: int) -> dict[str, Any]:
    """Columns of a row in registers at a time, 16 in a thread."""
    block = min(power_of_2(size), 8192)
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def quantize_both_triton(
    x: Tensor,
    column_factors: Tensor | None,
    row_factors: Tensor | None,
    maxima: Maxima | None = None,
    *,
    rows: bool = True,
) -> tuple[Rows, Rows]:
    """`quantize_both` as kernels, or without `rows` only the second of it; rows of x are contiguous.

    Maxima that are not given take a kernel that reads x before the one that writes codes. They are compared as
    integers, the bits of magnitudes, which have the same order, and NaN above all.
    """
    count, size = x.shape
    by_row = empty(count if rows else 0, size, x.device)
    padded = -(-count // ALIGNMENT) * ALIGNMENT
    by_column = empty(size, padded, x.device)
    factors = (column_factors, row_factors)
    options: dict[str, Any] = {
        "SIZE": size, "STRIDE": x.stride(0), "BY_ROW": rows,
        "COLUMN_FACTORS": column_factors is not None, "ROW_FACTORS": row_factors is not None,
    }  # fmt: skip
    if maxima is None:
        maxima = Maxima(*torch.zeros(count + size, dtype=torch.int32, device=x.device).split((count, size)))
        if count:
            grid = (triton.cdiv(count, 128), triton.cdiv(size, 64))
            _maxima_kernel[grid](x, *factors, *maxima, count, **options, ROWS=128, COLUMNS=64)
    if size:
        grid = (triton.cdiv(max(padded, 1), 32), triton.cdiv(size, 128))
        _codes_kernel[grid](x, *factors, *maxima, *by_row, *by_column, count, padded, **options, ROWS=32, COLUMNS=128)
    return by_row, by_column


def quantize_transposed_triton(x: Tensor, maxima: Tensor) -> Rows:
    """`transposed` as a kernel, of x with the `maxima` of its rows, which are contiguous."""
    count, size = x.shape
    padded = -(-count // ALIGNMENT) * ALIGNMENT
    codes, _ = empty(size, padded, x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    if codes.numel():
        grid = (triton.cdiv(padded, 64), triton.cdiv(size, 64))
        options = {"SIZE": size, "STRIDE": x.stride(0), "ROWS": 64, "COLUMNS": 64}
        _transposed_codes_kernel[grid](x, maxima, codes, scales, count, padded, **options)
    return Rows(codes, scales)


def transpose_triton(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """`transpose` as a kernel, of contiguous codes."""
    *experts, count, size = codes.shape
    padded = -(-count // ALIGNMENT) * ALIGNMENT
    shape = {"dtype": torch.uint8, "device": codes.device}
    out = torch.empty(*experts, size, padded, **shape) if out is None else out.view(torch.uint8)
    if out.numel():
        grid = (triton.cdiv(padded, 64), triton.cdiv(size, 64), *experts)
        _transpose_kernel[grid](codes.view(torch.uint8), out, count, padded, SIZE=size, ROWS=64, COLUMNS=64)
    return out.view(FP8)


@jit
def scale_of(bits):
    """The scale of a row from the bits of its largest magnitude."""
    scale = tl.maximum(tl.div_rn(bits.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38)  # 2^-126
    return tl.where(bits >= 0x7F800000, 1.0, scale)


@jit
def magnitude(x):
    """The bits of magnitudes."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def encode(x, scale):
    """Codes of float32 values that are divided by the scale; hardware turns infinities into 448."""
    x = tl.where(magnitude(x) == 0x7F800000, float("nan"), x * tl.div_rn(1.0, scale))
    return x.to(tl.float8e4nv)


@jit
def _rows_kernel(
    x, factors, codes, scales, SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr
):  # fmt: skip
    """A row that is longer than a block is read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    x += row * STRIDE
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        largest = tl.maximum(largest, magnitude(_part(x, factors, start, SIZE, BLOCK, FACTORS)))
    scale = scale_of(tl.max(largest, 0))
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        code = encode(_part(x, factors, start, SIZE, BLOCK, FACTORS), scale)
        tl.store(codes + row * SIZE + columns, code, mask=columns < SIZE)
    tl.store(scales + row, scale)


@jit
def _part(x, factors, start, SIZE: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    values = tl.load(x + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    if FACTORS:
        values *= tl.load(factors + columns, mask=columns < SIZE, other=0.0)
    return values


@jit
def _tile(x, rows, columns, count, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    inside = (rows < count)[:, None] & (columns < SIZE)[None, :]
    at = x + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@jit
def _by_column(values, factors, columns, SIZE: tl.constexpr, FACTORS: tl.constexpr):
    if FACTORS:
        values *= tl.load(factors + columns, mask=columns < SIZE, other=0.0)[None, :]
    return values


@jit
def _by_row(values, factors, rows, count, FACTORS: tl.constexpr):
    if FACTORS:
        values *= tl.load(factors + rows, mask=rows < count, other=0.0)[:, None]
    return values


@jit
def _maxima_kernel(
    x, column_factors, row_factors, row_maxima, column_maxima, count, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BY_ROW: tl.constexpr, COLUMN_FACTORS: tl.constexpr, ROW_FACTORS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of rows and of columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = _tile(x, rows, columns, count, SIZE, STRIDE)
    if BY_ROW:
        multiplied = _by_column(values, column_factors, columns, SIZE, COLUMN_FACTORS)
        tl.atomic_max(row_maxima + rows, tl.max(magnitude(multiplied), 1), mask=rows < count, sem="relaxed")
    values = _by_row(values, row_factors, rows, count, ROW_FACTORS)
    tl.atomic_max(column_maxima + columns, tl.max(magnitude(values), 0), mask=columns < SIZE, sem="relaxed")


@jit
def _codes_kernel(
    x, column_factors, row_factors, row_maxima, column_maxima, row_codes, row_scales, column_codes, column_scales,
    count, padded, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BY_ROW: tl.constexpr, COLUMN_FACTORS: tl.constexpr, ROW_FACTORS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = _tile(x, rows, columns, count, SIZE, STRIDE)
    if BY_ROW:
        multiplied = _by_column(values, column_factors, columns, SIZE, COLUMN_FACTORS)
        scale = scale_of(tl.load(row_maxima + rows, mask=rows < count, other=0))
        at = row_codes + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
        inside = (rows < count)[:, None] & (columns < SIZE)[None, :]
        tl.store(at, encode(multiplied, scale[:, None]), mask=inside)
        if tl.program_id(1) == 0:
            tl.store(row_scales + rows, scale, mask=rows < count)
    values = _by_row(values, row_factors, rows, count, ROW_FACTORS)
    scale = scale_of(tl.load(column_maxima + columns, mask=columns < SIZE, other=0))
    at = column_codes + columns.to(tl.int64)[:, None] * padded + rows[None, :]
    inside = (columns < SIZE)[:, None] & (rows < padded)[None, :]
    tl.store(at, tl.trans(encode(values, scale[None, :])), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(column_scales + columns, scale, mask=columns < SIZE)


@jit
def _transposed_codes_kernel(
    x, maxima, codes, scales, count, padded,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    scale = scale_of(tl.load(maxima + rows, mask=rows < count, other=0))
    tile = encode(_tile(x, rows, columns, count, SIZE, STRIDE), scale[:, None])
    at = codes + columns.to(tl.int64)[:, None] * padded + rows[None, :]
    tl.store(at, tl.trans(tile), mask=(columns < SIZE)[:, None] & (rows < padded)[None, :])
    if tl.program_id(1) == 0:
        tl.store(scales + rows, scale, mask=rows < count)


@jit
def _transpose_kernel(codes, out, count, padded, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    expert = tl.program_id(2).to(tl.int64)
    codes += expert * count * SIZE
    out += expert * padded * SIZE
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < count)[:, None] & (columns < SIZE)[None, :]
    tile = tl.load(codes + rows.to(tl.int64)[:, None] * SIZE + columns[None, :], mask=inside, other=0)
    at = out + columns.to(tl.int64)[:, None] * padded + rows[None, :]
    tl.store(at, tl.trans(tile), mask=(columns < SIZE)[:, None] & (rows < padded)[None, :])
