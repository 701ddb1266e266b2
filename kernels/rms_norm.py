"""Root-mean-square norm, with the residual's addition before it and its gradient after it.

Values are rounded where Hugging Face's modelling code rounds them: the sum with the residual, the normed value,
and its product with the weight. Statistics and the weight's gradient are float32 (float64 for float64).

Zero-centered norms (Gemma, Qwen3.5) multiply by 1 + weight, in the wide type, and round only the product.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import fp8
from rptrain.kernels.fp8 import Form, Operand, encode, magnitude, scale_of
from rptrain.kernels.launch import fused, jit, power_of_2, programs, tl, triton, warps
from rptrain.kernels.reference import dense as reference

SHARED = 96 << 10  # bytes of a multiprocessor for rows that are loaded ahead; the smaller GPUs have 99 KB


class Sizes(NamedTuple):
    """The launch sizes of the backward pass."""

    rows: int  # of a tile, which a program has in registers
    warps: int  # of a program
    stages: int  # as Triton counts: one less is how many tiles lie in shared memory; 1 loads into registers
    programs: int  # on a multiprocessor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> tuple[Tensor, Tensor]:
    """y like x [..., D], and 1 / rms [...] in the wide type."""
    if not fused(x):
        return reference.rms_norm(x, weight, eps, zero_centered=zero_centered)
    _, y, rstd = rms_norm_triton(x, None, weight, eps, zero_centered=zero_centered)
    return y, rstd


def rms_norm_operand(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: Form, *, zero_centered: bool = False
) -> tuple[Tensor, Operand, Tensor]:
    """x [T, D] plus the residual, if any (otherwise x itself), the sum's norm in `form`, and 1 / rms [T] of the sum."""
    if not fused(x):
        total = x if residual is None else x + residual
        y, rstd = reference.rms_norm(total, weight, eps, zero_centered=zero_centered)
        return total, fp8.operand(y, form), rstd
    return rms_norm_operand_triton(x, residual, weight, eps, form, zero_centered=zero_centered)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    grad_weight: Tensor | None,
    dresidual: Tensor | None = None,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """dx like x, plus `dresidual`, the gradient that flows past the norm; rounded once.

    Adds the weight's gradient to `grad_weight` [D], if any, in the wide type. With a residual, x is the sum, and dx is
    the gradient of both its terms.
    """
    backward = rms_norm_backward_triton if fused(x) else reference.rms_norm_backward
    return backward(dy, x, weight, rstd, grad_weight, dresidual, zero_centered=zero_centered)


def rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum (x itself without a residual), y and rstd; tensors are contiguous."""
    total, y, rstd = rms_norm_operand_triton(x, residual, weight, eps, Form.PLAIN, zero_centered=zero_centered)
    assert y.plain is not None
    return total, y.plain, rstd


def rms_norm_rows_triton(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Writes the norms of rows [T, D] to `out`; rows of both may be parts of wider ones. Returns 1 / rms [T]."""
    assert x.stride(1) == 1 and out.stride(1) == 1 and x.shape == out.shape
    rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        options: dict[str, Any] = {"ADD": False, "PLAIN": True, "CODES": False, "ZERO_CENTERED": False}
        options |= {"X_STRIDE": x.stride(0), "Y_STRIDE": out.stride(0), **_row(x.shape[1])}
        _forward[(len(x),)](x, x, x, weight, out, None, None, rstd, eps, **options)
    return rstd


def rms_norm_rows_backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_weight: Tensor | None
) -> None:
    """Writes dx over x; rows [T, D] of x and dy may be parts of wider ones. A row is read before it is written."""
    rows, size = x.shape
    if not rows:
        return
    sizes = _backward_sizes(size, x.element_size())
    count = min(programs(x.device, sizes.programs), triton.cdiv(rows, sizes.rows))
    partials = torch.empty(count, 1, size, dtype=torch.float32, device=x.device)
    options: dict[str, Any] = {"RESIDUAL": False, "ZERO_CENTERED": False, **_tile(size, sizes)}
    options |= {"X_STRIDE": x.stride(0), "DY_STRIDE": dy.stride(0)}
    _backward[(count,)](dy, x, weight, rstd, x, x, partials, rows, **options)
    add_partials(partials, (grad_weight,))


def rms_norm_operand_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: Form, *, zero_centered: bool = False
) -> tuple[Tensor, Operand, Tensor]:
    """`rms_norm_operand` as a kernel; tensors are contiguous, and without rows in FP8 of any shape [..., D]."""
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    size = x.shape[-1]
    total = x if residual is None else torch.empty_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    y = torch.empty_like(x) if Form.PLAIN in form else None
    rows = fp8.empty(len(x), size, x.device) if Form.ROWS in form else None
    if rstd.numel():
        added = x if residual is None else residual
        options = {"ADD": residual is not None, "PLAIN": y is not None, "CODES": rows is not None}
        options |= {"ZERO_CENTERED": zero_centered, "X_STRIDE": size, "Y_STRIDE": size, **_row(size)}
        _forward[(rstd.numel(),)](x, added, total, weight, y, *(rows or (None, None)), rstd, eps, **options)
    return total, Operand(x.dtype, y, rows), rstd


def rms_norm_backward_triton(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    grad_weight: Tensor | None,
    dresidual: Tensor | None,
    sizes: Sizes | None = None,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """dx, and the weight's gradient; tensors are contiguous. dx is no input's memory: rows are loaded ahead."""
    assert dy.is_contiguous() and x.is_contiguous() and (dresidual is None or dresidual.is_contiguous())
    size, rows = x.shape[-1], rstd.numel()
    dx = torch.empty_like(x)
    if rows:
        sizes = sizes or _backward_sizes(size, x.element_size())
        count = min(programs(x.device, sizes.programs), triton.cdiv(rows, sizes.rows))
        partials = torch.empty(count, 1, size, dtype=torch.float32, device=x.device)
        past = x if dresidual is None else dresidual
        options: dict[str, Any] = {"RESIDUAL": dresidual is not None, "ZERO_CENTERED": zero_centered}
        options |= {"X_STRIDE": size, "DY_STRIDE": size, **_tile(size, sizes)}
        _backward[(count,)](dy, x, weight, rstd, past, dx, partials, rows, **options)
        add_partials(partials, (grad_weight,))
    return dx


def add_partials(partials: Tensor, totals: Sequence[Tensor | None]) -> None:
    """Adds the sums over programs of partials [programs, N, D] to N accumulators [D], at most two, in a fixed order.

    Those of an accumulator None are left out.
    """
    rows, count, size = partials.shape
    assert count == len(totals) <= 2
    if all(total is None for total in totals):
        return
    places = [torch.empty_like(partials[0, 0]) if total is None else total for total in totals]
    columns = min(16, power_of_2(size))
    options: dict[str, Any] = {"COUNT": count, "SIZE": size, "COLUMNS": columns, **_lanes(rows, columns)}
    _add_partials[(triton.cdiv(size, columns), count)](partials, places[0], places[-1], rows, **options)


def _row(size: int) -> dict[str, Any]:
    """A row in one program: 16 elements a thread, two loads of 16 bytes in 16-bit types, up to rows of 8,192."""
    block = power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def _backward_sizes(size: int, itemsize: int) -> Sizes:
    """Sizes with enough bytes in flight to hide latency, but few programs: each writes a partial sum of D columns."""
    block = power_of_2(size)
    rows = max(1, min(4, 2048 // block))
    tile = 3 * rows * block * itemsize  # dy, x and dresidual
    each = 2 if 4 * tile <= SHARED else 1
    ahead = min(3, SHARED // (each * tile))
    # one tile ahead would be loaded after its forerunner is done with: no better than registers
    return Sizes(rows, max(1, min(16, rows * block // 256)), ahead + 1 if ahead > 1 else 1, each)


def _tile(size: int, sizes: Sizes) -> dict[str, Any]:
    """The constants of the backward pass."""
    constants = {"SIZE": size, "BLOCK": power_of_2(size), "ROWS": sizes.rows, "STAGES": sizes.stages}
    return constants | {"num_warps": sizes.warps}


def _lanes(rows: int, columns: int) -> dict[str, int]:
    """All partial sums of some columns at once, 16 a thread, up to 512."""
    lanes = min(512, power_of_2(rows))
    return {"ROWS": lanes, "num_warps": warps(lanes * columns)}


@jit
def _forward(
    x, residual, total, weight, y, codes, scales, rstd, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, PLAIN: tl.constexpr, CODES: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """A row a program, held in registers; codes are those of the rounded result."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = row * SIZE + columns
    dtype = total.dtype.element_ty
    values = tl.load(x + row * X_STRIDE + columns, mask=inside, other=0).to(tl.float32)
    if ADD:
        values += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(total + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(rstd + row, inverse)
    normed = values * inverse
    if ZERO_CENTERED:
        w += 1
    else:
        normed = normed.to(dtype).to(tl.float32)
    result = (normed * w).to(dtype)
    if PLAIN:
        tl.store(y + row * Y_STRIDE + columns, result, mask=inside)
    if CODES:
        result = result.to(tl.float32)
        scale = scale_of(tl.max(magnitude(result), 0))
        tl.store(codes + at, encode(result, scale), mask=inside)
        tl.store(scales + row, scale)


@jit
def _backward(
    dy, x, weight, rstd, dresidual, dx, partials, rows,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    X_STRIDE: tl.constexpr, DY_STRIDE: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """Every programs-th tile of ROWS rows; the weight's gradient of a program's rows stays in registers until the end.

    All loads of a tile stand before the first sum, which waits for every warp: none is issued across it.
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, ROWS).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    w = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)[None, :]
    if ZERO_CENTERED:
        w += 1
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + lanes
        at = row[:, None] * X_STRIDE + columns[None, :]  # of dresidual, too
        there = (row < rows)[:, None] & inside[None, :]
        inverse = tl.load(rstd + row, mask=row < rows, other=0)[:, None]
        dout = tl.load(dy + row[:, None] * DY_STRIDE + columns[None, :], mask=there, other=0).to(tl.float32)
        normed = tl.load(x + at, mask=there, other=0).to(tl.float32) * inverse
        past = tl.load(dresidual + at, mask=there, other=0).to(tl.float32) if RESIDUAL else 0.0
        total += dout * normed
        scaled = dout * w
        mean = (tl.sum(scaled * normed, 1) / SIZE)[:, None]
        din = (scaled - normed * mean) * inverse + past
        tl.store(dx + at, din.to(dx.dtype.element_ty), mask=there)
    tl.store(partials + program.to(tl.int64) * SIZE + columns, tl.sum(total, 0), mask=inside)


@jit
def _add_partials(
    partials, first, second, rows,
    COUNT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one accumulator."""
    which = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    place = (first if which == 0 else second) + columns
    before = tl.load(place, mask=inside, other=0)
    lanes = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        at = ((start + lanes) * COUNT + which)[:, None] * SIZE + columns[None, :]
        total += tl.load(partials + at, mask=(start + lanes < rows)[:, None] & inside[None, :], other=0)
    tl.store(place, before + tl.sum(total, 0), mask=inside)
