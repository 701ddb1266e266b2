"""Root-mean-square norm of heads with a gate: y = silu(z) * (weight * (x / rms(x))).

T tokens, K key heads, H = K r value heads of V columns. Values are rounded where Hugging Face's modelling code rounds
them: the normed value, its product with the weight, and the result. Gradients are rounded once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.launch import fused, jit, power_of_2, programs, tl, triton
from rptrain.kernels.reference import gated_norm as reference
from rptrain.kernels.rms_norm import add_partials


class Sizes(NamedTuple):
    """The launch sizes of a kernel."""

    tile: int  # elements, of whole heads: never less than the threads, so that no element is held twice
    warps: int
    programs: int  # of backward, on a multiprocessor


SIZES = Sizes(2048, 4, 4)  # two loads of 16 bytes a thread in 16-bit types


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y [T, H V] of x [T, H, V], contiguous, and the gate z [T, K, r V], a view with last stride 1; weight [V].

    A token moves 3 H V elements. Backward needs only the inputs.
    """
    if not fused(x):
        return reference.gated_norm(x, z, weight, eps)
    return gated_norm_triton(x, z, weight, eps)


def gated_norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, into: Tensor, grad_weight: Tensor | None
) -> Tensor:
    """dx [T, H, V]; writes dz to `into`, a view as z is, which may be z itself. dy is contiguous.

    Adds the weight's gradient to `grad_weight` [V], if any, in the wide type. A token moves 5 H V elements.
    """
    run = gated_norm_backward_triton if fused(x) else reference.gated_norm_backward
    return run(dy, x, z, weight, eps, into, grad_weight)


def gated_norm_triton(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    if len(x):
        rows, options = _launch(x, z)
        _forward[(triton.cdiv(rows, options["ROWS"]),)](x, z, weight, y, rows, eps, **options)
    return y.flatten(1)


def gated_norm_backward_triton(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, into: Tensor, grad_weight: Tensor | None
) -> Tensor:
    assert dy.is_contiguous() and into.stride() == z.stride()
    dx = torch.empty_like(x)
    if len(x):
        rows, options = _launch(x, z)
        count = min(programs(x.device, SIZES.programs), triton.cdiv(rows, options["ROWS"]))
        partials = torch.empty(count, 1, len(weight), dtype=torch.float32, device=x.device)
        _backward[(count,)](dy, x, z, weight, dx, into, partials, rows, eps, **options)
        add_partials(partials, (grad_weight,))
    return dx


def _launch(x: Tensor, z: Tensor) -> tuple[int, dict[str, Any]]:
    """The number of heads of all tokens, and the constants of both kernels."""
    tokens, heads, size = x.shape
    assert x.is_contiguous() and z.stride(2) == 1
    strides = {"Z_TOKEN": z.stride(0), "Z_HEAD": z.stride(1)}
    return tokens * heads, _constants(heads, heads // z.shape[1], size) | strides


def _constants(heads: int, repeat: int, size: int) -> dict[str, Any]:
    block = power_of_2(size)
    constants = {"H": heads, "REPEAT": repeat, "SIZE": size, "BLOCK": block, "ROWS": max(1, SIZES.tile // block)}
    return constants | {"num_warps": SIZES.warps}


@jit
def _places(
    first, rows, H: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    Z_TOKEN: tl.constexpr, Z_HEAD: tl.constexpr,
):  # fmt: skip
    """Where the heads from `first` on lie in x and in z, and which elements there are."""
    row, column = first + tl.arange(0, ROWS).to(tl.int64), tl.arange(0, BLOCK)
    token, head = row // H, (row % H).to(tl.int32)
    z_row = token * Z_TOKEN + (head // REPEAT * Z_HEAD + head % REPEAT * SIZE)
    there = (row < rows)[:, None] & (column < SIZE)[None, :]
    return row[:, None] * SIZE + column[None, :], z_row[:, None] + column[None, :], there


@jit
def _forward(
    x, z, weight, y, rows, eps,
    H: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    Z_TOKEN: tl.constexpr, Z_HEAD: tl.constexpr,
):  # fmt: skip
    at, z_at, there = _places(tl.program_id(0) * ROWS, rows, H, REPEAT, SIZE, BLOCK, ROWS, Z_TOKEN, Z_HEAD)
    column = tl.arange(0, BLOCK)
    dtype = y.dtype.element_ty
    values = tl.load(x + at, mask=there, other=0).to(tl.float32)
    gate = tl.load(z + z_at, mask=there, other=0).to(tl.float32)
    w = tl.load(weight + column, mask=column < SIZE, other=0).to(tl.float32)[None, :]
    inverse = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None]
    normed = (values * inverse).to(dtype).to(tl.float32)
    normed = (normed * w).to(dtype).to(tl.float32)
    tl.store(y + at, (gate * tl.sigmoid(gate) * normed).to(dtype), mask=there)


@jit
def _backward(
    dy, x, z, weight, dx, dz, partials, rows, eps,
    H: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    Z_TOKEN: tl.constexpr, Z_HEAD: tl.constexpr,
):  # fmt: skip
    """Every programs-th tile of ROWS heads; the weight's gradient stays in registers until the end."""
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < SIZE, other=0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        at, z_at, there = _places(tile * ROWS, rows, H, REPEAT, SIZE, BLOCK, ROWS, Z_TOKEN, Z_HEAD)
        dout = tl.load(dy + at, mask=there, other=0).to(tl.float32)
        values = tl.load(x + at, mask=there, other=0).to(tl.float32)
        gate = tl.load(z + z_at, mask=there, other=0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None]
        normed = values * inverse
        sigmoid = tl.sigmoid(gate)
        dgate = dout * normed * w * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(dz + z_at, dgate.to(dz.dtype.element_ty), mask=there)
        dnormed = dout * gate * sigmoid
        total += dnormed * normed
        dnormed *= w
        mean = (tl.sum(dnormed * normed, 1) / SIZE)[:, None]
        tl.store(dx + at, ((dnormed - normed * mean) * inverse).to(dx.dtype.element_ty), mask=there)
    tl.store(partials + program.to(tl.int64) * SIZE + column, tl.sum(total, 0), mask=column < SIZE)
