"""Root-mean-square norm, with the residual's addition before it and its gradient after it.

Values are rounded where Hugging Face's modelling code rounds them: the sum with the residual, the normed value,
and its product with the weight. Statistics and the weight's gradient are float32 (float64 for float64).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels import reference
from rptrain.kernels.launch import fused, power_of_2, programs, tl, triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y like x [..., D], and 1 / rms [...] in the wide type."""
    if not fused(x):
        return reference.rms_norm(x, weight, eps)
    _, y, rstd = rms_norm_triton(x, None, weight, eps)
    return y, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + residual [..., D], its norm, and 1 / rms [...] of the sum."""
    if not fused(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    return rms_norm_triton(x, residual, weight, eps)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_weight: Tensor, dresidual: Tensor | None = None
) -> Tensor:
    """dx like x, plus `dresidual`, the gradient that flows past the norm; rounded once.

    Adds the weight's gradient to `grad_weight` [D] in the wide type. With a residual, x is the sum, and dx is the
    gradient of both its terms.
    """
    if not fused(x):
        return reference.rms_norm_backward(dy, x, weight, rstd, grad_weight, dresidual)
    return rms_norm_backward_triton(dy, x, weight, rstd, grad_weight, dresidual)


class RMSNorm(torch.autograd.Function):
    """`rms_norm` for autograd: x, weight, eps to y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        grad_weight = torch.zeros_like(weight, dtype=rstd.dtype)
        dx = rms_norm_backward(grad_outputs[0].contiguous(), x, weight, rstd, grad_weight)
        return dx, grad_weight.to(weight.dtype), None


def rms_norm_triton(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum (x itself without a residual), y and rstd; tensors are contiguous."""
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    size = x.shape[-1]
    total = x if residual is None else torch.empty_like(x)
    y = torch.empty_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rstd.numel():
        options = {"ADD": residual is not None, **_row(size)}
        _forward[(rstd.numel(),)](x, x if residual is None else residual, total, weight, y, rstd, eps, **options)
    return total, y, rstd


def rms_norm_backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_weight: Tensor, dresidual: Tensor | None
) -> Tensor:
    """dx, and the weight's gradient; tensors are contiguous."""
    assert dy.is_contiguous() and x.is_contiguous() and (dresidual is None or dresidual.is_contiguous())
    size, rows = x.shape[-1], rstd.numel()
    dx = torch.empty_like(x)
    if rows:
        options = {"RESIDUAL": dresidual is not None, **_row(size)}
        # 64 registers a thread, and twice as many above 4,096: 32 or 16 warps are what a multiprocessor holds
        each = max(1, min(4, 32 // options["num_warps"])) if size <= 4096 else 1
        count = min(programs(x.device, each), rows)
        partials = torch.empty(count, 1, size, dtype=torch.float32, device=x.device)
        past = x if dresidual is None else dresidual
        _backward[(count,)](dy, x, weight, rstd, past, dx, partials, rows, **options)
        add_partials(partials, (grad_weight,))
    return dx


def add_partials(partials: Tensor, totals: Sequence[Tensor]) -> None:
    """Adds the sums over programs of partials [programs, N, D] to N accumulators [D], at most two, in a fixed order."""
    rows, count, size = partials.shape
    assert count == len(totals) <= 2
    columns = min(32, power_of_2(size))
    options: dict[str, Any] = {"COUNT": count, "SIZE": size, "ROWS": 64, "COLUMNS": columns, "num_warps": 4}
    _add_partials[(triton.cdiv(size, columns), count)](partials, totals[0], totals[-1], rows, **options)


def _row(size: int) -> dict[str, Any]:
    """A row in one program: 8 elements a thread, 16 bytes in 16-bit types, up to rows of 4,096."""
    block = power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(16, block // 256))}


@triton.jit
def _forward(
    x, residual, total, weight, y, rstd, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """A row a program, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = row * SIZE + columns
    dtype = y.dtype.element_ty
    values = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if ADD:
        values += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(total + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(rstd + row, inverse)
    normed = (values * inverse).to(dtype).to(tl.float32)
    tl.store(y + at, (normed * w).to(dtype), mask=inside)


@triton.jit
def _backward(
    dy, x, weight, rstd, dresidual, dx, partials, rows,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Every programs-th row; the weight's gradient of a program's rows stays in registers until the end."""
    program = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    w = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tl.cdiv(rows - tl.program_id(0), count)):
        row = program + step * count
        at = row * SIZE + columns
        inverse = tl.load(rstd + row)
        dout = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0).to(tl.float32) * inverse
        total += dout * normed
        scaled = dout * w
        din = (scaled - normed * (tl.sum(scaled * normed, 0) / SIZE)) * inverse
        if RESIDUAL:
            din += tl.load(dresidual + at, mask=inside, other=0).to(tl.float32)
        tl.store(dx + at, din.to(dx.dtype.element_ty), mask=inside)
    tl.store(partials + program * SIZE + columns, total, mask=inside)


@triton.jit
def _add_partials(
    partials, first, second, rows,
    COUNT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one accumulator."""
    which = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    lanes = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        at = ((start + lanes) * COUNT + which)[:, None] * SIZE + columns[None, :]
        total += tl.load(partials + at, mask=(start + lanes < rows)[:, None] & inside[None, :], other=0)
    place = (first if which == 0 else second) + columns
    tl.store(place, tl.load(place, mask=inside, other=0) + tl.sum(total, 0), mask=inside)
