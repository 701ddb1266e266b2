"""Grouped products: rows sorted by expert, each times its expert's weight; gradients of weights and biases.

Suffixes as in kernels/reference/moe.py. Weights are [E, K, M] with any strides, so those stored as [E, out, in] are
passed as `w.mT`, and the gradient of the input is the product with the transposed weight. Where the rows of an expert
end is known on the device only: launches follow from N, and programs look up their expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels.launch import fused, jit, power_of_2, tl, triton
from rptrain.kernels.reference import moe as reference
from rptrain.kernels.target import KB, Target, target_of


class Tiles(NamedTuple):
    """Sizes of a program's tile, `inner` along the sum, and its launch options."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


HOPPER = Tiles(128, 256, 64, 8, 3)  # 144 KB shared
AMPERE = Tiles(128, 128, 64, 8, 3)  # 96 KB; also where 99 KB are all there is
WIDE = Tiles(64, 64, 32, 4, 2)  # float32, without matrix units
LEAST = Tiles(64, 64, 16, 4, 1)  # for 64 KB, and 16 bits without matrix units


def grouped_mm(x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor, bias_EM: Tensor | None = None) -> Tensor:
    """Rows of expert e, which end at ends_E[e], times w_EKM[e], plus bias_EM[e] where given: [N, M]."""
    if not fused(x_NK, w_EKM):
        return reference.grouped_mm(x_NK, w_EKM, ends_E, bias_EM)
    if not _cutlass(x_NK, w_EKM):
        return grouped_mm_triton(x_NK, w_EKM, ends_E, bias_EM)
    y_NM = F.grouped_mm(x_NK, w_EKM, offs=ends_E)
    return y_NM if bias_EM is None else add_bias_triton(y_NM, bias_EM, ends_E)


def grouped_mm_add(x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor, y_NM: Tensor) -> None:
    """Adds to the rows of y_NM, contiguous, their product as in `grouped_mm`; each sum is rounded once."""
    if not fused(x_NK, w_EKM):
        return reference.grouped_mm_add(x_NK, w_EKM, ends_E, y_NM)
    return grouped_mm_add_triton(x_NK, w_EKM, ends_E, y_NM)


def grouped_weight_grad(acc_EKM: Tensor, x_NK: Tensor, dy_NM: Tensor, ends_E: Tensor) -> None:
    """Adds x.T @ dy of each expert's rows to its part of `acc_EKM`, of the wide type; without rows it is untouched."""
    if not fused(x_NK, dy_NM):
        return reference.grouped_weight_grad(acc_EKM, x_NK, dy_NM, ends_E)
    return grouped_weight_grad_triton(acc_EKM, x_NK, dy_NM, ends_E)


def grouped_bias_grad(acc_EM: Tensor | None, dy_NM: Tensor, ends_E: Tensor) -> None:
    """Adds the sum of each expert's rows to its part of `acc_EM`, of the wide type. None: nothing is computed."""
    if acc_EM is None:
        return None
    if not fused(dy_NM):
        return reference.grouped_bias_grad(acc_EM, dy_NM, ends_E)
    return grouped_bias_grad_triton(acc_EM, dy_NM, ends_E)


def _cutlass(x_NK: Tensor, w_EKM: Tensor) -> bool:
    """Whether torch's product takes the operands and is the faster: on Hopper and data center Blackwell.

    It needs bfloat16, one dimension contiguous in each, and the others 16-byte aligned.
    """
    strides = x_NK.stride()[:1] + w_EKM.stride()
    return (
        x_NK.dtype == w_EKM.dtype == torch.bfloat16
        and target_of(x_NK.device).async_matrix_units
        and x_NK.stride(1) == 1
        and 1 in w_EKM.stride()[1:]
        and all(stride == 1 or stride % 8 == 0 for stride in strides)
        and w_EKM.shape[1] % 8 == w_EKM.shape[2] % 8 == 0
        and x_NK.data_ptr() % 16 == w_EKM.data_ptr() % 16 == 0
    )


def _tiles(x: Tensor) -> Tiles:
    return _tiles_for(x.dtype, target_of(x.device))


def _tiles_for(dtype: torch.dtype, target: Target) -> Tiles:
    """The tiles for a GPU."""
    if not target.matrix_units or target.shared_memory < 99 * KB:
        return LEAST
    if dtype == torch.float32:
        return WIDE
    return HOPPER if target.async_matrix_units else AMPERE


def _for_adding(tiles: Tiles) -> Tiles:
    """Tiles for adding, whose inner size is a short rank; float32 would spill in one long step of the loop."""
    return tiles._replace(inner=16)


def grouped_mm_triton(x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor, bias_EM: Tensor | None = None) -> Tensor:
    """`grouped_mm` as a kernel; the rows of x are contiguous."""
    y_NM = x_NK.new_empty(x_NK.shape[0], w_EKM.shape[2])
    _product(x_NK, w_EKM, ends_E, bias_EM, y_NM, add=False)
    return y_NM


def grouped_mm_add_triton(x_NK: Tensor, w_EKM: Tensor, ends_E: Tensor, y_NM: Tensor) -> None:
    _product(x_NK, w_EKM, ends_E, None, y_NM, add=True)


def _product(x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None, y: Tensor, *, add: bool) -> None:
    experts, inner, columns = w.shape
    tiles = _for_adding(_tiles(x)) if add else _tiles(x)
    # every expert may end in a tile of its own that is not full
    grid = ((triton.cdiv(x.shape[0], tiles.rows) + experts) * triton.cdiv(columns, tiles.columns),)
    by_expert, by_inner, by_column = w.stride()
    _grouped_kernel[grid](
        x, w, bias, y, ends, experts, BY_ROW=x.stride(0), K=inner, M=columns,
        BY_EXPERT=by_expert, BY_INNER=by_inner, BY_COLUMN=by_column,
        BIAS=bias is not None, ADD=add, EXPERTS=power_of_2(experts), **_sizes(tiles),
    )  # fmt: skip


def grouped_weight_grad_triton(acc_EKM: Tensor, x_NK: Tensor, dy_NM: Tensor, ends_E: Tensor) -> None:
    """`grouped_weight_grad` as a kernel; the rows of x and dy are contiguous."""
    if acc_EKM.stride(2) != 1:  # the last dimension of a tile is that of its contiguous stores
        acc_EKM, x_NK, dy_NM = acc_EKM.mT, dy_NM, x_NK
    experts, inner, outer = acc_EKM.shape
    tiles = _tiles(x_NK)
    grid = (experts * triton.cdiv(inner, tiles.rows) * triton.cdiv(outer, tiles.columns),)
    by_expert, by_inner, _ = acc_EKM.stride()
    _weight_grad_kernel[grid](
        acc_EKM, x_NK, dy_NM, ends_E, K=inner, M=outer, X_BY_ROW=x_NK.stride(0), DY_BY_ROW=dy_NM.stride(0),
        BY_EXPERT=by_expert, BY_INNER=by_inner, **_sizes(tiles),
    )  # fmt: skip


def grouped_bias_grad_triton(acc_EM: Tensor, dy_NM: Tensor, ends_E: Tensor) -> None:
    """`grouped_bias_grad` as a kernel, of contiguous tensors."""
    experts, columns = acc_EM.shape
    _bias_grad_kernel[(experts, triton.cdiv(columns, 128))](
        acc_EM, dy_NM, ends_E, columns, ROWS=32, COLUMNS=128, num_warps=4
    )


def add_bias_triton(y_NM: Tensor, bias_EM: Tensor, ends_E: Tensor) -> Tensor:
    """Adds to each row the bias of its expert, in place; contiguous tensors."""
    rows, columns = y_NM.shape
    experts = bias_EM.shape[0]
    block = min(power_of_2(columns), 2048)
    _add_bias_kernel[(rows, triton.cdiv(columns, block))](
        y_NM, bias_EM, ends_E, columns, experts, EXPERTS=power_of_2(experts), BLOCK=block, num_warps=4
    )
    return y_NM


def _sizes(tiles: Tiles) -> dict[str, Any]:
    rows, columns, inner, warps, stages = tiles
    return {"ROWS": rows, "COLUMNS": columns, "INNER": inner, "num_warps": warps, "num_stages": stages}


@jit
def _rows_of(ends, expert):
    """Where the expert's rows begin and end."""
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    return begin, tl.load(ends + expert)


@jit
def _grouped_kernel(
    x, w, bias, y, ends, experts, BY_ROW: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    BY_EXPERT: tl.constexpr, BY_INNER: tl.constexpr, BY_COLUMN: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(M, COLUMNS)
    tile = tl.program_id(0) // across
    numbers = tl.arange(0, EXPERTS)
    stops = tl.load(ends + numbers, mask=numbers < experts, other=0)
    begins = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < experts), other=0)
    counts = (stops - begins + ROWS - 1) // ROWS
    after = tl.cumsum(counts, 0)
    if tile >= tl.sum(counts, 0):
        return
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    here = numbers == expert
    first = tl.sum(tl.where(here, begins + (tile - after + counts) * ROWS, 0), 0)
    stop = tl.sum(tl.where(here, stops, 0), 0)

    rows = first + tl.arange(0, ROWS)
    places = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, INNER)
    x_at = x + first.to(tl.int64) * BY_ROW + tl.arange(0, ROWS)[:, None] * BY_ROW + depth[None, :]
    w_at = w + expert.to(tl.int64) * BY_EXPERT + depth[:, None] * BY_INNER + places[None, :] * BY_COLUMN
    y_at = y + rows.to(tl.int64)[:, None] * M + places[None, :]
    inside = (rows < stop)[:, None] & (places < M)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if ADD:
        total += tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, K, INNER):
        if K % INNER == 0:
            a = tl.load(x_at, mask=(rows < stop)[:, None], other=0.0)
            b = tl.load(w_at, mask=(places < M)[None, :], other=0.0)
        else:
            left = depth < K - start
            a = tl.load(x_at, mask=(rows < stop)[:, None] & left[None, :], other=0.0)
            b = tl.load(w_at, mask=left[:, None] & (places < M)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_at += INNER
        w_at += INNER * BY_INNER
    if BIAS:
        total += tl.load(bias + expert * M + places, mask=places < M, other=0.0).to(tl.float32)[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=inside)


@jit
def _weight_grad_kernel(
    acc, x, dy, ends, K: tl.constexpr, M: tl.constexpr, X_BY_ROW: tl.constexpr, DY_BY_ROW: tl.constexpr,
    BY_EXPERT: tl.constexpr, BY_INNER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(M, COLUMNS)
    tiles = tl.cdiv(K, ROWS) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    begin, end = _rows_of(ends, expert)
    if begin == end:
        return
    down = (tile // across) * ROWS + tl.arange(0, ROWS)
    right = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, INNER)
    x_at = x + begin.to(tl.int64) * X_BY_ROW + depth[None, :] * X_BY_ROW + down[:, None]
    dy_at = dy + begin.to(tl.int64) * DY_BY_ROW + depth[:, None] * DY_BY_ROW + right[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, INNER):
        left = depth < end - start
        a = tl.load(x_at, mask=(down < K)[:, None] & left[None, :], other=0.0)
        b = tl.load(dy_at, mask=left[:, None] & (right < M)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_at += INNER * X_BY_ROW
        dy_at += INNER * DY_BY_ROW
    at = acc + expert.to(tl.int64) * BY_EXPERT + down.to(tl.int64)[:, None] * BY_INNER
    half: tl.constexpr = COLUMNS // 2  # at a time: registers do not hold the sum and all that it is added to
    first, second = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, half)), (0, 2, 1)))
    right = (tile % across) * COLUMNS + tl.arange(0, half)
    mask = (down < K)[:, None] & (right < M)[None, :]
    tl.store(at + right[None, :], tl.load(at + right[None, :], mask=mask, other=0.0) + first, mask=mask)
    right += half
    mask = (down < K)[:, None] & (right < M)[None, :]
    tl.store(at + right[None, :], tl.load(at + right[None, :], mask=mask, other=0.0) + second, mask=mask)


@jit
def _bias_grad_kernel(acc, dy, ends, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    expert = tl.program_id(0)
    begin, end = _rows_of(ends, expert)
    if begin == end:
        return
    places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (places < columns)[None, :]
        at = dy + rows.to(tl.int64)[:, None] * columns + places[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = acc + expert * columns + places
    mask = places < columns
    tl.store(at, tl.load(at, mask=mask, other=0.0) + tl.sum(total, 0), mask=mask)


@jit
def _add_bias_kernel(y, bias, ends, columns, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    stops = tl.load(ends + numbers, mask=numbers < experts, other=2147483647)
    expert = tl.sum((stops <= row).to(tl.int32), 0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = places < columns
    at = y + row.to(tl.int64) * columns + places
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + expert * columns + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, value.to(y.dtype.element_ty), mask=mask)
