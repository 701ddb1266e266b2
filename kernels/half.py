"""Half sums: products of 16-bit matrices with float16 sums of at most 128 terms, each added to float32 registers.

GeForce cards sum products of 16-bit matrices in float16 at twice the rate of float32. float16 has 5 bits of exponent,
so operands are divided by powers of two, which is exact: by one for each row of an operand, or of its part that a sum
covers. Neither operands nor sums then overflow, whatever the range of the values, and a bfloat16 value keeps its bits
if it is not below 2^-17 of its row's largest. Scales follow from values alone, so the same inputs have the same bits.
NaN and infinity pass through.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.launch import HAS_TRITON, jit, power_of_2, rows_and_columns, tl, triton
from rptrain.kernels.target import target_of

TERMS = 128  # of a sum in float16, at most
TYPES = (torch.bfloat16, torch.float16)


def takes(x: Tensor) -> bool:
    """Whether the kernels take x: they need a 16-bit type, and matrix units that sum in float16."""
    return HAS_TRITON and x.dtype in TYPES and target_of(x.device).half_sums


def takes_heads(x: Tensor, size: int) -> bool:
    """Whether products with heads of this size, in the type and on the device of x, can be summed in float16."""
    return takes(x) and size <= TERMS


class ScaledHeads(NamedTuple):
    """Heads in float16: the row of a token and head is values[t, h] * scales[h, t]."""

    values: Tensor  # [T, H, C]; magnitudes below 2
    scales: Tensor  # [H, T], float32 powers of two, contiguous
    dtype: torch.dtype  # of the heads before

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


Heads = Tensor | ScaledHeads  # [T, H, C]
SCALE_BYTES = 4  # of a token and head


def scaled_heads(x_THC: Tensor) -> ScaledHeads:
    """The heads in float16; those of a token lie side by side."""
    tokens, heads, size = x_THC.shape
    values = torch.empty(x_THC.shape, dtype=torch.float16, device=x_THC.device)
    scales = torch.empty(heads, tokens, dtype=torch.float32, device=x_THC.device)
    block = power_of_2(size)
    rows = max(4096 // block, 1)
    sizes: dict[str, Any] = {"STRIDE": x_THC.stride(0), "C": size, "BLOCK_C": block, "ROWS": rows}
    _heads_kernel[(triton.cdiv(tokens, rows), heads)](x_THC, values, scales, tokens, **sizes)
    return ScaledHeads(values, scales, x_THC.dtype)


class Tiles(NamedTuple):
    """Sizes of a program's tile, and its launch options."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


WHOLE = Tiles(128, 128, 64, 8, 2)
UNEVEN = Tiles(64, 64, 64, 4, 2)  # masks along K take registers


def product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out [M, N] = A [M, K] B^T for B [N, K], rounded once; with `add`, what out holds is added before.

    A and B have any strides, so a transposed view costs nothing; rows of out are contiguous.
    """
    (rows, inner), columns = a.shape, len(b)
    tiles = WHOLE if inner % WHOLE.terms == 0 else UNEVEN
    if rows and columns:
        grid = (triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns),)
        _product_kernel[grid](
            out, a, b, rows, inner, COUNT=columns, OUT_STRIDE=out.stride(0),
            A_ROW=a.stride(0), A_TERM=a.stride(1), B_ROW=b.stride(0), B_TERM=b.stride(1),
            **constants(tiles, inner, add),
        )  # fmt: skip


def constants(tiles: Tiles, inner: int, add: bool) -> dict[str, Any]:
    """Constants and options of the product's kernel."""
    return {
        "ADD": add, "EVEN": inner % tiles.terms == 0, "ROWS": tiles.rows, "COLUMNS": tiles.columns,
        "TERMS": tiles.terms, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


@jit
def power_below(x):
    """The greatest power of two that is not above a magnitude: 1 for NaN and infinity, and 2^-111 to 2^126.

    The product of the power, or of its inverse, and 128 is thus a normal number.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.minimum(tl.maximum(bits >> 23, 16), 253)
    exponent = tl.where(bits >= 0x7F800000, 127, exponent)
    return (exponent << 23).to(tl.float32, bitcast=True)


@jit
def inverse(power):
    """1 / power, of a power of two."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@jit
def normalized(x, unit: tl.constexpr, axis: tl.constexpr):
    """Slices along the axis as values * powers, in float16: the largest magnitude lies from `unit` to `2 * unit`.

    It is less for slices below 2^-111. `unit` is a power of two, at most 128.
    """
    x = x.to(tl.float32)
    power = power_below(tl.max(tl.abs(x), axis))
    return (x * tl.expand_dims(inverse(power) * unit, axis)).to(tl.float16), power * (1.0 / unit)


@jit
def sum_of(a, b):
    """a [M, K] times b [K, N], float16, with at most 128 terms, summed in float16: in float32."""
    return tl.dot(a, b, out_dtype=tl.float16).to(tl.float32)


@jit
def _heads_kernel(
    x, values, scales, tokens, STRIDE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    head, heads = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_C)
    inside = (row < tokens)[:, None] & (column < C)[None, :]
    start, place = row.to(tl.int64)[:, None], head * C + column[None, :]
    half, power = normalized(tl.load(x + start * STRIDE + place, mask=inside, other=0.0), 1.0, 1)
    tl.store(values + start * (heads * C) + place, half, mask=inside)
    tl.store(scales + head.to(tl.int64) * tokens + row, power, mask=row < tokens)


@jit
def _product_kernel(
    out, a, b, rows, inner, COUNT: tl.constexpr, OUT_STRIDE: tl.constexpr,
    A_ROW: tl.constexpr, A_TERM: tl.constexpr, B_ROW: tl.constexpr, B_TERM: tl.constexpr,
    ADD: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    mine, theirs = rows_and_columns(rows, COUNT, ROWS, COLUMNS)
    depth = tl.arange(0, TERMS)
    a_at = a + mine.to(tl.int64)[:, None] * A_ROW + depth[None, :] * A_TERM
    b_at = b + theirs.to(tl.int64)[None, :] * B_ROW + depth[:, None] * B_TERM
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, TERMS):
        if EVEN:
            left = tl.load(a_at, mask=(mine < rows)[:, None], other=0.0)
            right = tl.load(b_at, mask=(theirs < COUNT)[None, :], other=0.0)
        else:
            inside = depth < inner - start
            left = tl.load(a_at, mask=(mine < rows)[:, None] & inside[None, :], other=0.0)
            right = tl.load(b_at, mask=inside[:, None] & (theirs < COUNT)[None, :], other=0.0)
        left, left_power = normalized(left, 8.0, 1)
        right, right_power = normalized(right, 8.0, 0)
        total += sum_of(left, right) * left_power[:, None] * right_power[None, :]
        a_at += TERMS * A_TERM
        b_at += TERMS * B_TERM
    inside = (mine < rows)[:, None] & (theirs < COUNT)[None, :]
    at = out + mine.to(tl.int64)[:, None] * OUT_STRIDE + theirs[None, :]
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)
