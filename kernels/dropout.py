"""Dropout with counter-based random numbers: masks are recomputed from the place instead of stored.

Philox's key is the seed; its counter the step, the sample, the layer and place, the position in the sample and the
column. Therefore masks do not depend on micro-batches, devices or earlier random numbers. An element uses 16 bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rptrain.kernels.launch import fused, jit, power_of_2, tl, triton
from rptrain.kernels.reference import dropout as reference

BLOCK = 256  # groups of 8 columns, at most
PART = 1 << 16  # elements, without kernels: the mask is made of wide integers, which stay in the caches


@dataclass(frozen=True, eq=False)
class Dropout:
    """The place of a mask. `numbers`: the seed, the step and the index of the first sequence.

    `numbers` is a tensor, so that CUDA graphs read current values. Tokens are sequences of `length`, one sample each.
    """

    p: float  # of an element to become 0; in steps of 2 ** -16, less than 1
    numbers: Tensor  # int64 [3], on the device
    length: int
    layer: int
    place: int  # in the layer, below 256

    @property
    def threshold(self) -> int:
        """Elements are kept if their 16 bits are below this."""
        return max(round((1 - self.p) * 65536), 1)

    @property
    def scale(self) -> float:
        return 65536 / self.threshold

    @property
    def number(self) -> int:
        """The number of layer and place together."""
        return self.layer << 8 | self.place


def dropout(x_TD: Tensor, drop: Dropout) -> Tensor:
    """x with a mask, and scaled to keep its mean; the same for the gradient in backward."""
    return dropout_triton(x_TD, drop) if fused(x_TD) else _in_parts(torch.empty_like(x_TD), x_TD, drop, add=False)


def add_dropout(out_TD: Tensor, x_TD: Tensor, drop: Dropout) -> Tensor:
    """Adds the same to `out_TD` in place, rounded once; returns it."""
    return add_dropout_triton(out_TD, x_TD, drop) if fused(x_TD) else _in_parts(out_TD, x_TD, drop, add=True)


def _in_parts(out_TD: Tensor, x_TD: Tensor, drop: Dropout, add: bool) -> Tensor:
    tokens, width = x_TD.shape
    numbers = drop.numbers, drop.length, drop.number, drop.threshold
    rows = max(PART // width, 1)
    for begin in range(0, tokens, rows):
        x, out = x_TD[begin : begin + rows], out_TD[begin : begin + rows]
        mask = reference.kept(len(x), width, *numbers, begin=begin)
        dropped = reference.dropout(x, mask, drop.scale)
        (out.add_ if add else out.copy_)(dropped)
    return out_TD


def dropout_triton(x_TD: Tensor, drop: Dropout) -> Tensor:
    """`dropout` as a kernel, of a contiguous tensor."""
    return _launch(torch.empty_like(x_TD), x_TD, drop, add=False)


def add_dropout_triton(out_TD: Tensor, x_TD: Tensor, drop: Dropout) -> Tensor:
    """`add_dropout` as a kernel, of contiguous tensors."""
    return _launch(out_TD, x_TD, drop, add=True)


def _launch(out_TD: Tensor, x_TD: Tensor, drop: Dropout, add: bool) -> Tensor:
    tokens, width = x_TD.shape
    groups = triton.cdiv(width, 8)
    block = min(power_of_2(groups), BLOCK)
    _dropout_kernel[(tokens, triton.cdiv(groups, block))](
        x_TD, out_TD, drop.numbers, drop.length, drop.number, drop.threshold, drop.scale,
        WIDTH=width, GROUPS=groups, ADD=add, ROUNDS=reference.ROUNDS, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out_TD


@jit
def _dropout_kernel(
    x, out, numbers, length, place, threshold, scale,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, ADD: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed, step, first = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    at = ((token % length).to(tl.int64) * GROUPS + group).to(tl.uint32)
    zero = at ^ at
    sample = (first + token // length).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, at, zero + step.to(tl.uint32), zero + sample, (zero + place).to(tl.uint32), ROUNDS)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # in order along the two last dimensions
    bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK, 8)).to(tl.int32)
    columns = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    offset = token.to(tl.int64) * WIDTH + columns
    inside = columns < WIDTH
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * scale
    value = tl.where(bits < threshold, value, 0.0)
    if ADD:
        value += tl.load(out + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=inside)
