"""Products of FP8 matrices: A [M, K] times the transposed B [N, K], whose rows the matrix units read along K.

Products are summed in float32; what the matrix units sum in fewer bits is added to a float32 sum after at most 128
terms.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import cublaslt
from rptrain.kernels.fp8 import ALIGNMENT, Rows, on_gpu
from rptrain.kernels.launch import jit, rows_and_columns, tl, triton
from rptrain.kernels.reference import fp8 as reference
from rptrain.kernels.target import Target, target_of

TERMS = 128  # of a product that the matrix units sum by themselves


class Tiles(NamedTuple):
    """Sizes of a program's tile, and its launch options."""

    rows: int
    columns: int
    warps: int
    stages: int


HOPPER = Tiles(128, 128, 8, 4)
ADA = Tiles(128, 128, 8, 3)  # 96 KB shared, of 99
UNEVEN = Tiles(64, 64, 4, 2)  # masks along K take registers


def product(a: Rows, b: Rows, dtype: torch.dtype) -> Tensor:
    """A [M, K] times the transposed B [N, K], rounded once to `dtype`: [M, N]."""
    if not on_gpu(a.codes):
        return reference.product(a.codes, b.codes, a.scales, b.scales).to(dtype)
    if _has_library(a.codes, b.codes, dtype):
        return _scaled_mm(a, b.codes, b.scales, dtype)
    return product_triton(a, b, dtype)


def accumulate(acc: Tensor | None, a: Rows, b: Tensor) -> None:
    """acc [M, N] += A B^T in float32, with the codes b [N, K] of B, whose scales are in A. None: nothing is computed.

    The gradient of a weight [out, in]: `a` has the columns of the output's gradient, multiplied by the scales of the
    input's rows, and `b` the columns of the input's codes.
    """
    if acc is None:
        return
    if not on_gpu(a.codes):
        acc += reference.product(a.codes, b, a.scales, None)
        return
    ones = torch.ones(len(b), device=b.device)
    if not (_adds_in_library(a.codes, b) and cublaslt.add_product(acc, acc, *a, b, ones)):
        accumulate_triton(acc, a, b)


def product_add(a: Rows, b: Rows, x: Tensor) -> Tensor:
    """x [M, N] plus A [M, K] times the transposed B [N, K], as a new tensor.

    The sum is rounded once, unless torch's product runs, whose result is rounded before it is added.
    """
    if not on_gpu(a.codes):
        return (reference.product(a.codes, b.codes, a.scales, b.scales) + x).to(x.dtype)
    if x.dtype in cublaslt.TYPES and _adds_in_library(a.codes, b.codes):
        out = torch.empty_like(x)
        if cublaslt.add_product(out, x, *a, *b):
            return out
    return product(a, b, x.dtype).add_(x)


def product_workspace(tokens: int, inputs: int, outputs: int, *, fused: bool) -> int:
    """Upper bound of the bytes that the gradients of a product [tokens, inputs] to [tokens, outputs] need at once.

    For the input's gradient these are the codes of the input, and those of the output's gradient by rows and by
    columns; then the codes of the input are transposed. The reference operations also upcast their operands.
    """
    tokens = -(-tokens // ALIGNMENT) * ALIGNMENT
    scales = 8 * (tokens + inputs + outputs)
    if fused:
        return scales + max(tokens * (inputs + 2 * outputs), tokens * (2 * inputs + outputs))
    return scales + tokens * (2 * inputs + 2 * outputs) + 12 * tokens * (inputs + outputs) + 8 * inputs * outputs


def _has_library(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch has a product by rows of these codes, with a result in `dtype`."""
    return a.shape[1] % ALIGNMENT == len(b) % ALIGNMENT == 0 and dtype in _library(target_of(a.device), _cuda())


def _adds_in_library(a: Tensor, b: Tensor) -> bool:
    """Whether cuBLASLt adds products by rows of these codes to a matrix."""
    aligned = a.shape[1] % ALIGNMENT == len(b) % ALIGNMENT == 0 < a.numel() * b.numel()
    return aligned and cublaslt.has_products(target_of(a.device), _cuda())


def _library(target: Target, cuda: tuple[int, ...]) -> tuple[torch.dtype, ...]:
    """The types in which torch's products by rows are written: float32 by cuBLAS alone."""
    if target.cublas_fp8_rows and cuda >= cublaslt.CUDA:
        return torch.bfloat16, torch.float32
    return (torch.bfloat16,) if target.cutlass_fp8_rows else ()


def _cuda() -> tuple[int, ...]:
    """The version of CUDA that torch was built for."""
    return tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))


def _scaled_mm(a: Rows, b: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    by_row = {"scale_a": a.scales[:, None], "scale_b": scales[None]}
    scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]: stubs of torch 2.13 leave it out
    return scaled_mm(a.codes, b.t(), **by_row, out_dtype=dtype, use_fast_accum=False)


def product_triton(a: Rows, b: Rows, dtype: torch.dtype) -> Tensor:
    """`product` as a kernel; codes are contiguous along K."""
    out = torch.empty(len(a.codes), len(b.codes), dtype=dtype, device=a.codes.device)
    _product(out, a, b.codes, b.scales, add=False)
    return out


def accumulate_triton(acc: Tensor, a: Rows, b: Tensor) -> None:
    """`accumulate` as a kernel; codes are contiguous along K, and the rows of acc are contiguous."""
    _product(acc, a, b, None, add=True)


def _product(out: Tensor, a: Rows, b: Tensor, scales: Tensor | None, *, add: bool) -> None:
    (rows, inner), columns = a.codes.shape, len(b)
    target = target_of(out.device)
    tile = tiles(inner % TERMS == 0, target)
    if rows and columns:
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)
        _product_kernel[grid](
            out, a.codes, b, a.scales, scales, rows, columns, OUT_STRIDE=out.stride(0), A_STRIDE=a.codes.stride(0),
            B_STRIDE=b.stride(0), K=inner, **constants(tile, target, add),
        )  # fmt: skip


def tiles(even: bool, target: Target) -> Tiles:
    """The tiles for a GPU; `even`: whether the steps along the sum divide it."""
    if not even:
        return UNEVEN
    return HOPPER if target.async_matrix_units else ADA


def limit(terms: int, target: Target) -> int | None:
    """The limit of terms, `max_num_imprecise_acc`, of a product that has so many.

    Triton folds a sum into the product before it, and so into what the matrix units sum by themselves, unless the
    product has a limit of terms. On Hopper it has one by default, and keeps a second sum if it is given.
    """
    return None if target.async_matrix_units else terms


def constants(tiles: Tiles, target: Target, add: bool) -> dict[str, Any]:
    """Constants and options of the product's kernel."""
    return {
        "ADD": add, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "TERMS": TERMS, "LIMIT": limit(TERMS, target),
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


@jit
def _product_kernel(
    out, a, b, a_scales, b_scales, rows, columns,
    OUT_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    mine, theirs = rows_and_columns(rows, columns, ROWS, COLUMNS)
    depth = tl.arange(0, TERMS)
    a_at = a + mine.to(tl.int64)[:, None] * A_STRIDE + depth[None, :]
    b_at = b + theirs.to(tl.int64)[None, :] * B_STRIDE + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, TERMS):
        if K % TERMS == 0:
            left = tl.load(a_at, mask=(mine < rows)[:, None], other=0.0)
            right = tl.load(b_at, mask=(theirs < columns)[None, :], other=0.0)
        else:
            inside = depth < K - start
            left = tl.load(a_at, mask=(mine < rows)[:, None] & inside[None, :], other=0.0)
            right = tl.load(b_at, mask=inside[:, None] & (theirs < columns)[None, :], other=0.0)
        total += tl.dot(left, right, max_num_imprecise_acc=LIMIT)
        a_at += TERMS
        b_at += TERMS
    total *= tl.load(a_scales + mine, mask=mine < rows, other=0.0)[:, None]
    inside = (mine < rows)[:, None] & (theirs < columns)[None, :]
    at = out + mine.to(tl.int64)[:, None] * OUT_STRIDE + theirs[None, :]
    if ADD:
        total += tl.load(at, mask=inside, other=0.0)
    else:
        total *= tl.load(b_scales + theirs, mask=theirs < columns, other=0.0)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)
