"""Causal convolution by channel, SiLU, and the L2 norm of the heads of queries and keys.

T tokens, K key heads of C columns, H = K r value heads of V columns, width W. Inputs are views of a product's output
with last stride 1: q and k [T, K, C], v [T, K, r V]. The weight [2 K C + H V, 1, W] has the channels of q, then of k,
then of v; its last tap is that of the token itself. Everything is float32 inside (float64 for float64) and rounded
once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.launch import fused, jit, power_of_2, tl, triton
from rptrain.kernels.reference import causal_conv as reference
from rptrain.kernels.reference.causal_conv import EPS
from rptrain.kernels.rms_norm import add_partials

MAX_WIDTH = 8  # of more, threads spill, and compiling takes minutes
MIN_WIDTH = 2  # the kernels carry at least one earlier input


class Sizes(NamedTuple):
    """The launch sizes of a kernel."""

    steps: int  # tokens that a stripe visits; backward writes the gradients of all but the last W - 1
    unroll: int  # of these, loaded at once
    tile: int  # elements of a step: tokens of different stripes
    warps: int
    stages: int  # as Triton counts: one less is how many loads ahead lie in shared memory; 1 loads into registers


FORWARD = Sizes(64, 4, 1024, 4, 1)  # 16 bytes a thread in 16-bit types
BACKWARD = Sizes(64, 2, 512, 4, 3)


def causal_conv(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [T, K, C], each head divided by its length, and values [T, K, r V] = [T, H, V]; contiguous.

    `positions` [T] are those in the token's document: taps that reach before its start read zero. A token's inputs
    are read once and its outputs written once, 2 (2 K C + H V) elements. Backward needs only the inputs.
    """
    if not fused(q):
        return reference.causal_conv(q, k, v, weight, positions)
    return causal_conv_triton(q, k, v, weight, positions)


def causal_conv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    positions: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    grad_weight: Tensor | None,
) -> None:
    """Writes the gradients of the inputs q, k and v to `into`, views as they are, which share no memory with them.

    dq, dk and dv are contiguous; dv may be [T, H, V]. Adds the weight's gradient to `grad_weight` [channels, 1, W], if
    any, in the wide type. The forward pass is recomputed: 3 (2 K C + H V) elements per token. Besides, the kernel takes
    a partial sum like `grad_weight` for each 244 tokens, or more where a head has fewer than 128 columns.
    """
    run = causal_conv_backward_triton if fused(q) else reference.causal_conv_backward
    run(dq, dk, dv, q, k, v, weight, positions, into, grad_weight)


def causal_conv_from(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, history: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`causal_conv` in decoding: documents continue after `history` [documents, channels, W - 1], their last inputs.

    `cu_seqlens` [documents + 1]: where the documents' new tokens start, and T. All in torch, without a wait.
    """
    return reference.causal_conv_from(q, k, v, weight, history, cu_seqlens)


def last_inputs(
    q: Tensor, k: Tensor, v: Tensor, width: int, cu_seqlens: Tensor, history: Tensor | None = None
) -> Tensor:
    """The last `width` - 1 inputs of each document, [documents, channels, width - 1]: the next `history`.

    Where a document has fewer tokens, those of `history` come before them, or zeros. q, k, v and `cu_seqlens` are
    those of `causal_conv_from`, or of a prompt.
    """
    return reference.last_inputs(q, k, v, width, cu_seqlens, history)


def causal_conv_triton(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    outs = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(k.shape), v.new_empty(v.shape)
    if len(q):
        grid, options = _launch(q, k, v, weight, FORWARD, 0)
        _forward[grid](q, k, v, *outs, weight, positions, len(q), EPS, **options)
    return outs


def causal_conv_backward_triton(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    positions: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    grad_weight: Tensor | None,
) -> None:
    assert dq.is_contiguous() and dk.is_contiguous() and dv.is_contiguous()
    assert all(dx.stride() == x.stride() for dx, x in zip(into, (q, k, v), strict=True))
    if len(q):
        grid, options = _launch(q, k, v, weight, BACKWARD, weight.shape[-1] - 1)
        partials = torch.empty(grid[1], 1, weight.numel(), dtype=torch.float32, device=q.device)
        _backward[grid](dq, dk, dv, q, k, v, *into, weight, positions, partials, len(q), EPS, **options)
        add_partials(partials, (None if grad_weight is None else grad_weight.view(-1),))


def _launch(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, sizes: Sizes, after: int
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, heads of queries and keys and blocks of values by tokens, and the constants of both kernels."""
    _, heads, size = q.shape
    assert q.stride() == k.stride() and q.stride(2) == v.stride(2) == 1 and weight.is_contiguous()
    options = _constants(heads, size, v.shape[2], weight.shape[-1], sizes, after)
    options |= {"TOKEN": q.stride(0), "HEAD": q.stride(1), "V_TOKEN": v.stride(0), "V_HEAD": v.stride(1)}
    parts = heads * (2 + triton.cdiv(v.shape[2], options["BLOCK"]))
    return (parts, triton.cdiv(len(q), options["STRIPES"] * options["LENGTH"])), options


def _constants(heads: int, size: int, values: int, width: int, sizes: Sizes, after: int) -> dict[str, Any]:
    """A tile has a token of each of STRIPES stripes, and a head's columns. `after`: tokens visited beyond LENGTH."""
    block = power_of_2(size)
    constants = {"K": heads, "C": size, "VALUES": values, "WIDTH": width, "LENGTH": sizes.steps - after}
    constants |= {"BLOCK": block, "STRIPES": max(1, sizes.tile // block), "UNROLL": sizes.unroll}
    return constants | {"STAGES": sizes.stages, "num_warps": sizes.warps}


@jit
def _weights(weight, column, inside, WIDTH: tl.constexpr):
    """Those of the token itself and of the WIDTH - 1 tokens before it."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        at = column * WIDTH + (WIDTH - 1 - tap)
        taps += (tl.load(weight + at, mask=inside, other=0).to(tl.float32)[None, :],)
    return taps


@jit
def _before(x, token, first, tokens, column, inside, TOKEN: tl.constexpr, WIDTH: tl.constexpr):
    """The inputs of the WIDTH - 1 tokens before `token`, counted from `first`; the nearest comes first."""
    ring = ()
    for tap in tl.static_range(1, WIDTH):
        there = (first + token >= tap) & (token < tokens)
        at = (token - tap)[:, None] * TOKEN + column[None, :]
        ring += (tl.load(x + at, mask=there[:, None] & inside[None, :], other=0).to(tl.float32),)
    return ring


@jit
def _load(x, token, tokens, column, inside, TOKEN: tl.constexpr, UNROLL: tl.constexpr):
    """The rows of UNROLL tokens from `token` on."""
    rows = ()
    for i in tl.static_range(UNROLL):
        there = (token + i < tokens)[:, None] & inside[None, :]
        at = (token + i)[:, None] * TOKEN + column[None, :]
        rows += (tl.load(x + at, mask=there, other=0),)
    return rows


@jit
def _load_positions(positions, token, tokens, UNROLL: tl.constexpr):
    places = ()
    for i in tl.static_range(UNROLL):
        places += (tl.load(positions + token + i, mask=token + i < tokens, other=0)[:, None],)
    return places


@jit
def _convolve(value, ring, weights, position, WIDTH: tl.constexpr):
    """The convolution at a token, its inputs without those of other documents, and the next token's `ring`.

    Products are added by fused operations: the compiler may not choose which of two is rounded, and choose differently
    in each copy of an unrolled loop.
    """
    conv = value * weights[0]
    taps = (value,)
    following = (value,)
    for tap in tl.static_range(1, WIDTH):
        before = tl.where(position >= tap, ring[tap - 1], 0.0)
        conv = tl.fma(before, weights[tap], conv)
        taps += (before,)
        if tap < WIDTH - 1:
            following += (before,)
    return conv, taps, following


@jit
def _head(
    x, y, weight, positions, column, inside, first, tokens, eps,
    TOKEN: tl.constexpr, Y_TOKEN: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr,
    STRIPES: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of a program's tokens. Each stripe keeps its last inputs in registers.

    Tokens are counted from `first`; `tokens` of them follow.
    """
    weights = _weights(weight, column, inside, WIDTH)
    start = tl.arange(0, STRIPES) * LENGTH
    ring = _before(x, start, first, tokens, column, inside, TOKEN, WIDTH)
    for step in tl.range(0, LENGTH, UNROLL, num_stages=STAGES):
        rows = _load(x, start + step, tokens, column, inside, TOKEN, UNROLL)
        places = _load_positions(positions, start + step, tokens, UNROLL)
        for i in tl.static_range(UNROLL):
            conv, _, ring = _convolve(rows[i].to(tl.float32), ring, weights, places[i], WIDTH)
            out = conv * tl.sigmoid(conv)
            if NORM:
                out *= tl.rsqrt(tl.sum(out * out, 1) + eps)[:, None]
            token = start + (step + i)
            there = (token < tokens)[:, None] & inside[None, :]
            tl.store(y + token[:, None] * Y_TOKEN + column[None, :], out.to(y.dtype.element_ty), mask=there)


@jit
def _forward(
    q, k, v, q_out, k_out, v_out, weight, positions, tokens, eps,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr, STRIPES: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has a head of q or k, or a block of a key head's values, for STRIPES * LENGTH tokens."""
    BLOCKS: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    part = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * (STRIPES * LENGTH)
    left = (tokens - first).to(tl.int32)
    positions += first
    column = tl.arange(0, BLOCK)
    if part < 2 * K:
        head = part % K
        x = (q if part < K else k) + first * TOKEN + head * HEAD
        y = (q_out if part < K else k_out) + first * (K * C) + head * C
        _head(
            x, y, weight + part * (C * WIDTH), positions, column, column < C, first, left, eps,
            TOKEN, K * C, True, WIDTH, LENGTH, STRIPES, UNROLL, STAGES,
        )  # fmt: skip
    else:
        head, block = (part - 2 * K) // BLOCKS, (part - 2 * K) % BLOCKS
        column += block * BLOCK
        x = v + first * V_TOKEN + head * V_HEAD
        y = v_out + first * (K * VALUES) + head * VALUES
        _head(
            x, y, weight + (2 * K * C + head * VALUES) * WIDTH, positions, column, column < VALUES, first, left, eps,
            V_TOKEN, K * VALUES, False, WIDTH, LENGTH, STRIPES, UNROLL, STAGES,
        )  # fmt: skip


@jit
def _activate_backward(dy, conv, eps, NORM: tl.constexpr):
    """The gradient of the convolution's result."""
    sigmoid = tl.sigmoid(conv)
    if NORM:
        y = conv * sigmoid
        inverse = tl.rsqrt(tl.sum(y * y, 1) + eps)
        along = tl.sum(dy * y, 1) * inverse * inverse
        dy = tl.fma(-along[:, None], y, dy) * inverse[:, None]
    return dy * sigmoid * tl.fma(conv, 1 - sigmoid, 1.0)


@jit
def _head_backward(
    dy, x, dx, weight, positions, partials, column, inside, first, tokens, eps,
    TOKEN: tl.constexpr, Y_TOKEN: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr, STRIPES: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of some columns of a program's tokens.

    A token's gradient is complete WIDTH - 1 tokens later. `sums` are those of the tokens before, the nearest first.
    Tokens after a stripe's last one are visited for that; their own inputs' gradients and those of the weights are
    another stripe's.
    """
    weights = _weights(weight, column, inside, WIDTH)
    start = tl.arange(0, STRIPES) * LENGTH
    ring = _before(x, start, first, tokens, column, inside, TOKEN, WIDTH)
    zeros = tl.zeros((STRIPES, BLOCK), tl.float32)
    sums = ()
    totals = (zeros,)
    for _ in tl.static_range(1, WIDTH):
        sums += (zeros,)
        totals += (zeros,)
    for step in tl.range(0, LENGTH + WIDTH - 1, UNROLL, num_stages=STAGES):
        rows = _load(x, start + step, tokens, column, inside, TOKEN, UNROLL)
        gradients = _load(dy, start + step, tokens, column, inside, Y_TOKEN, UNROLL)
        places = _load_positions(positions, start + step, tokens, UNROLL)
        for i in tl.static_range(UNROLL):
            conv, taps, ring = _convolve(rows[i].to(tl.float32), ring, weights, places[i], WIDTH)
            dconv = _activate_backward(gradients[i].to(tl.float32), conv, eps, NORM)
            own = tl.where(step + i < LENGTH, dconv, 0.0)
            new_sums = (dconv * weights[0],)
            new_totals = (tl.fma(own, taps[0], totals[0]),)
            for tap in tl.static_range(1, WIDTH):
                reached = tl.where(places[i] >= tap, dconv, 0.0)
                new_sums += (tl.fma(reached, weights[tap], sums[tap - 1]),)
                new_totals += (tl.fma(own, taps[tap], totals[tap]),)
            token = start + (step + i - (WIDTH - 1))
            there = ((step + i >= WIDTH - 1) & (token < tokens))[:, None] & inside[None, :]
            at = token[:, None] * TOKEN + column[None, :]
            tl.store(dx + at, new_sums[WIDTH - 1].to(dx.dtype.element_ty), mask=there)
            sums = ()
            for tap in tl.static_range(WIDTH - 1):
                sums += (new_sums[tap],)
            totals = new_totals
    for tap in tl.static_range(WIDTH):
        tl.store(partials + column * WIDTH + (WIDTH - 1 - tap), tl.sum(totals[tap], 0), mask=inside)


@jit
def _backward(
    dq, dk, dv, q, k, v, dq_in, dk_in, dv_in, weight, positions, partials, tokens, eps,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr, STRIPES: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs as in `_forward`; partials are [programs of tokens, channels, WIDTH]."""
    BLOCKS: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    part = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * (STRIPES * LENGTH)
    left = (tokens - first).to(tl.int32)
    positions += first
    partials += tl.program_id(1).to(tl.int64) * (K * (2 * C + VALUES) * WIDTH)
    column = tl.arange(0, BLOCK)
    if part < 2 * K:
        head, channel = part % K, part * C
        dy = (dq if part < K else dk) + first * (K * C) + head * C
        x = (q if part < K else k) + first * TOKEN + head * HEAD
        dx = (dq_in if part < K else dk_in) + first * TOKEN + head * HEAD
        _head_backward(
            dy, x, dx, weight + channel * WIDTH, positions, partials + channel * WIDTH, column, column < C,
            first, left, eps, TOKEN, K * C, True, WIDTH, LENGTH, BLOCK, STRIPES, UNROLL, STAGES,
        )  # fmt: skip
    else:
        head, block = (part - 2 * K) // BLOCKS, (part - 2 * K) % BLOCKS
        channel = 2 * K * C + head * VALUES
        column += block * BLOCK
        dy = dv + first * (K * VALUES) + head * VALUES
        x, dx = v + first * V_TOKEN + head * V_HEAD, dv_in + first * V_TOKEN + head * V_HEAD
        _head_backward(
            dy, x, dx, weight + channel * WIDTH, positions, partials + channel * WIDTH, column, column < VALUES,
            first, left, eps, V_TOKEN, K * VALUES, False, WIDTH, LENGTH, BLOCK, STRIPES, UNROLL, STAGES,
        )  # fmt: skip
