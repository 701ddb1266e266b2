"""SwiGLU on the fused product of gate and up, plain and in GPT-OSS's clamped form, and its backward.

The activation is rounded where Hugging Face's modelling code rounds it; gradients are rounded once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import fp8
from rptrain.kernels.fp8 import Form, Maxima, Operand, encode, magnitude, scale_of
from rptrain.kernels.launch import fused, jit, power_of_2, tl, triton
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.reference.dense import Clamp

__all__ = ["Clamp", "swiglu", "swiglu_backward"]

BLOCK = 1024  # columns of a program, 8 for each thread of 4 warps
LONGEST = 16384  # columns of a row that fit in registers


class Tiles(NamedTuple):
    """The sizes of the backward pass that finds maxima."""

    tiles: int  # of a program, one after the other
    rows: int  # of a tile
    columns: int
    warps: int


TILES = Tiles(16, 8, 128, 2)  # a row in one warp, whose largest value takes no shared memory


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


def swiglu_operand(gate_up: Tensor, form: Form) -> Operand:
    """`swiglu` of gate and up in this order, in `form`."""
    if form is Form.ROWS and fused(gate_up):
        return swiglu_rows_triton(gate_up)
    return fp8.operand(swiglu(gate_up), form)


def swiglu_backward_with_maxima(
    dy: Tensor, gate_up: Tensor, column_factors: Tensor, row_factors: Tensor
) -> tuple[Tensor, Maxima | None, Tensor, Maxima | None]:
    """`swiglu_backward` of gate and up in this order, for gradients that are quantized.

    Returns the gradient, written over gate_up, and its maxima with the factors of `fp8.quantize_both`; and the
    activation, written over dy, and its maxima by row. Maxima are None where nothing but a pass over the result finds
    them.
    """
    if fused(gate_up):
        return swiglu_backward_with_maxima_triton(dy, gate_up, column_factors, row_factors)
    return swiglu_backward(dy, gate_up, gate_up, dy), None, dy, None


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


def swiglu_rows_triton(gate_up: Tensor) -> Operand:
    """`swiglu_operand` in FP8 alone, as a kernel."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    rows = fp8.empty(tokens, size, gate_up.device)
    if tokens:
        _forward_rows[(tokens,)](gate_up, *rows, SIZE=size, **_row(size))
    return Operand(gate_up.dtype, rows=rows)


def swiglu_backward_with_maxima_triton(
    dy: Tensor, gate_up: Tensor, column_factors: Tensor, row_factors: Tensor
) -> tuple[Tensor, Maxima, Tensor, Maxima]:
    """`swiglu_backward_with_maxima` as a kernel; tensors are contiguous."""
    tokens, size = dy.shape
    assert dy.is_contiguous() and gate_up.is_contiguous()
    maxima = torch.zeros(2 * tokens + 2 * size, dtype=torch.int32, device=dy.device)
    by_row, by_column, of_activation = maxima.split((tokens, 2 * size, tokens))
    if dy.numel():
        grid = (triton.cdiv(tokens, TILES.rows * TILES.tiles), triton.cdiv(size, TILES.columns))
        _backward_measured[grid](
            dy, gate_up, column_factors, row_factors, by_row, by_column, of_activation, tokens, SIZE=size, **_tiles()
        )  # fmt: skip
    return gate_up, Maxima(by_row, by_column), dy, Maxima(of_activation)


def _row(size: int) -> dict[str, Any]:
    """A row in one program, up to 16,384 columns at a time, 16 per thread."""
    block = min(power_of_2(size), LONGEST)
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def _tiles() -> dict[str, int]:
    return {"TILES": TILES.tiles, "ROWS": TILES.rows, "COLUMNS": TILES.columns, "num_warps": TILES.warps}


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


@jit
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


@jit
def _hold(gate, up, limit):
    """Comparisons rather than minima, so that NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


@jit
def _activation(gate, up, alpha, dtype: tl.constexpr, CLAMPED: tl.constexpr):
    """The activation of clamped values; every operation of the model's code rounds to `dtype`."""
    if CLAMPED:
        share = tl.sigmoid((gate * alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        product = (gate * share).to(dtype).to(tl.float32) * (up + 1).to(dtype).to(tl.float32)
    else:
        product = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    return product.to(dtype)


@jit
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


@jit
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


@jit
def _forward_rows(gate_up, codes, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A row that is longer than a block is read and computed twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    gate, up = _load(gate_up, row, 0, SIZE, BLOCK, False)
    product = _activation(gate, up, 0.0, dtype, False).to(tl.float32)
    largest = magnitude(product)
    for start in range(BLOCK, SIZE, BLOCK):
        gate, up = _load(gate_up, row, start, SIZE, BLOCK, False)
        largest = tl.maximum(largest, magnitude(_activation(gate, up, 0.0, dtype, False).to(tl.float32)))
    scale = scale_of(tl.max(largest, 0))
    columns = tl.arange(0, BLOCK)
    tl.store(codes + row * SIZE + columns, encode(product, scale), mask=columns < SIZE)
    for start in range(BLOCK, SIZE, BLOCK):
        gate, up = _load(gate_up, row, start, SIZE, BLOCK, False)
        code = encode(_activation(gate, up, 0.0, dtype, False).to(tl.float32), scale)
        tl.store(codes + row * SIZE + start + columns, code, mask=start + columns < SIZE)
    tl.store(scales + row, scale)


@jit
def _backward_measured(
    dy, gate_up, column_factors, row_factors, row_maxima, column_maxima, activation_maxima, tokens,
    SIZE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of TILES tiles of ROWS rows. The gradient replaces gate and up, and the activation dy.

    Maxima are those of rounded values. Those of columns stay in registers until the last tile.
    """
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < SIZE
    dtype = dy.dtype.element_ty
    gate_factors = tl.load(column_factors + columns, mask=within, other=0.0)[None, :]
    up_factors = tl.load(column_factors + SIZE + columns, mask=within, other=0.0)[None, :]
    of_gate = tl.zeros((ROWS, COLUMNS), tl.int32)
    of_up = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tile in range(TILES):
        rows = ((tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = rows < tokens
        inside = there[:, None] & within[None, :]
        gate_at = gate_up + rows[:, None] * (2 * SIZE) + columns[None, :]
        dy_at = dy + rows[:, None] * SIZE + columns[None, :]
        gate = tl.load(gate_at, mask=inside, other=0).to(tl.float32)
        up = tl.load(gate_at + SIZE, mask=inside, other=0).to(tl.float32)
        dout = tl.load(dy_at, mask=inside, other=0).to(tl.float32)
        share = tl.sigmoid(gate)
        dgate = (dout * up * share * (1 + gate * (1 - share))).to(dtype)
        dup = (dout * gate * share).to(dtype)
        product = _activation(gate, up, 0.0, dtype, False)
        tl.debug_barrier()  # it does not depend on dy: no warp may write over what another has yet to read
        tl.store(dy_at, product, mask=inside)
        tl.store(gate_at, dgate, mask=inside)
        tl.store(gate_at + SIZE, dup, mask=inside)

        largest = tl.max(magnitude(product.to(tl.float32)), 1)
        tl.atomic_max(activation_maxima + rows, largest, mask=there, sem="relaxed")
        dgate, dup = dgate.to(tl.float32), dup.to(tl.float32)
        largest = tl.max(tl.maximum(magnitude(dgate * gate_factors), magnitude(dup * up_factors)), 1)
        tl.atomic_max(row_maxima + rows, largest, mask=there, sem="relaxed")
        factors = tl.load(row_factors + rows, mask=there, other=0.0)[:, None]
        of_gate = tl.maximum(of_gate, magnitude(dgate * factors))
        of_up = tl.maximum(of_up, magnitude(dup * factors))
    tl.atomic_max(column_maxima + columns, tl.max(of_gate, 0), mask=within, sem="relaxed")
    tl.atomic_max(column_maxima + SIZE + columns, tl.max(of_up, 0), mask=within, sem="relaxed")
