"""Rotary positions on queries and keys, with the norm of every head before them (Qwen3), out of the fused product.

In the product of gated attention, every head's query is followed by the gate of its output (Qwen3.5): these queries are
read, and their gradients written, at a stride of two heads, and nothing touches the gates.

The rotation turns (x[i], x[i + R/2]) by the angle whose cosine and sine are cos, sin [T, R/2], for the first R of a
head's C columns; the others stay as they are. A factor on the attention (YaRN) is in cos and sin already. Queries may
have a further factor for each token. A normed value is rounded where Hugging Face's modelling code rounds it, a rotated
one once. For attention that sums in float16, the kernel also scales q, k and v (kernels/half.py).
"""

from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.batch import Rotation
from rptrain.kernels.half import Heads, ScaledHeads, inverse, power_below, takes_heads
from rptrain.kernels.launch import fused, jit, power_of_2, programs, tl, triton
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.reference.dense import QKNorm
from rptrain.kernels.rms_norm import add_partials, rms_norm_rows_backward_triton, rms_norm_rows_triton

__all__ = ["QKNorm", "qk_norm_rope", "qk_norm_rope_backward"]

STRIDES = ("dq_token", "dq_head", "dk_token", "dk_head", "dv_token", "dv_head")
Rotated = tuple[Heads, Heads, Heads, Tensor | None]


def qk_norm_rope(
    qkv: Tensor,
    rotation: Rotation | None,
    kv_heads: int,
    size: int,
    norm: QKNorm | None = None,
    *,
    half_sums: bool = False,
    gated: bool = False,
) -> Rotated:
    """q [T, H, C], k and v [T, K, C] of the product qkv [T, (H + 2K) C], and with norms 1 / rms: [T, H + K], or [T, 2].

    `size` is C. v is a view of qkv. With norms, q and k of qkv are left as they are, and backward needs them. Without,
    q and k are rotated in place and are views of it too, so nothing is copied. With `half_sums` the three are
    ScaledHeads in the same places, where kernels run that can sum products of such heads in float16. If `gated`, which
    takes norms of each head, the product is [T, (2H + 2K) C], with a gate behind each query.
    """
    if not fused(qkv):
        return reference.qk_norm_rope(qkv, rotation, kv_heads, size, norm, gated=gated)
    half_sums = half_sums and takes_heads(qkv, size)
    return qk_norm_rope_triton(qkv, rotation, kv_heads, size, norm, half_sums=half_sums, gated=gated)


def qk_norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    rotation: Rotation | None,
    norm: QKNorm | None = None,
    rstd: Tensor | None = None,
    grads: tuple[Tensor | None, Tensor | None] | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """The gradient of the product, written over qkv [T, (H + 2K) C] (without norms what that holds does not matter).

    If `gated`, qkv is [T, (2H + 2K) C], and its gates, where their gradient may be already, are left as they are.
    dq [T, H, C], dk and dv [T, K, C] may be strided over tokens and heads. With norms, takes `rstd` of the forward
    and adds the gradients of q's and k's weights to `grads`, each [C] in the wide type, or None to leave it out.
    """
    if not fused(qkv):
        return reference.qk_norm_rope_backward(dq, dk, dv, qkv, rotation, norm, rstd, grads, gated=gated)
    return qk_norm_rope_backward_triton(dq, dk, dv, qkv, rotation, norm, rstd, grads, gated=gated)


def qk_norm_rope_triton(
    qkv: Tensor,
    rotation: Rotation | None,
    kv_heads: int,
    size: int,
    norm: QKNorm | None,
    *,
    half_sums: bool = False,
    gated: bool = False,
) -> Rotated:
    assert qkv.is_contiguous()
    cos, sin, factor, pairs = _tables(rotation, qkv)
    whole = norm if norm is not None and norm.whole else None
    by_head = norm if whole is None else None
    assert by_head is not None or not gated
    source, rstd, scales = qkv, None, None
    if whole is not None:
        source, rstd = _whole_norms(qkv, kv_heads * size, whole)
    q, k, values = reference.split_heads(qkv, kv_heads, size, gated=gated)
    tokens, heads = q.shape[:2]
    if whole is not None:
        q, k = source.view(tokens, heads + kv_heads, size).split((heads, kv_heads), 1)
    target = torch.float16 if half_sums else qkv.dtype
    q, k, v = (x.view(target) for x in (q, k, values))
    if not pairs and by_head is None and not half_sums:
        return q, k, v, rstd
    if half_sums:
        scales = torch.empty(heads + 2 * kv_heads, tokens, dtype=torch.float32, device=qkv.device)
    if by_head is not None:
        q, k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
        rstd = torch.empty(tokens, heads + kv_heads, dtype=torch.float32, device=qkv.device)
    if tokens:
        weights = (cos, cos, cos, 0.0) if by_head is None else (by_head.q_weight, by_head.k_weight, rstd, by_head.eps)
        options: dict[str, Any] = {"H": heads, "K": kv_heads, "NORM": by_head is not None, "PAIRS": pairs}
        options |= {"ROW": source.shape[1], "V_ROW": qkv.shape[1], "GATED": gated, **_tile(heads, size)}
        options["ZERO_CENTERED"] = by_head is not None and by_head.zero_centered
        _forward[(tokens,)](
            source, values, q, k, v, scales, cos, sin, factor, *weights, q.stride(0), k.stride(0), **options
        )  # fmt: skip
    if scales is None:
        return q, k, v, rstd
    parts = zip((q, k, v), scales.split((heads, kv_heads, kv_heads)), strict=True)
    q, k, v = (ScaledHeads(values, part, qkv.dtype) for values, part in parts)
    return q, k, v, rstd


def qk_norm_rope_backward_triton(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    rotation: Rotation | None,
    norm: QKNorm | None,
    rstd: Tensor | None,
    grads: tuple[Tensor | None, Tensor | None] | None,
    *,
    gated: bool = False,
) -> Tensor:
    assert qkv.is_contiguous()
    if norm is not None and rstd is not None and norm.whole:
        turned = qkv.new_empty(len(dq), (dq.shape[1] + dk.shape[1]) * dq.shape[2])
        _turn_back(dq, dk, dv, turned, rotation, None, None, None, gated=False)
        return _whole_norms_backward(turned, dv, qkv, norm, rstd, grads or (None, None))
    _turn_back(dq, dk, dv, qkv, rotation, norm, rstd, grads, gated=gated)
    return qkv


def _turn_back(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    target: Tensor,
    rotation: Rotation | None,
    norm: QKNorm | None,
    rstd: Tensor | None,
    grads: tuple[Tensor | None, Tensor | None] | None,
    *,
    gated: bool,
) -> None:
    """Writes the gradients of queries and keys over `target` [T, …], and those of values if it has columns for them."""
    cos, sin, factor, pairs = _tables(rotation, target)
    assert all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (dq, dk, dv))
    tokens, heads, size = dq.shape
    kv_heads = dk.shape[1]
    assert heads >= kv_heads
    if not tokens:
        return
    place = target.view(tokens, -1, size)[:, heads + gated * heads + kv_heads :]
    copied = place.shape[1] > 0 and (dv.data_ptr() != place.data_ptr() or dv.stride() != place.stride())
    constants, each = _backward_sizes(heads, kv_heads, size, norm is not None, pairs)
    constants |= {"H": heads, "K": kv_heads, "PAIRS": pairs, "ROW": target.shape[1], "GATED": gated}
    constants["ZERO_CENTERED"] = norm is not None and norm.zero_centered
    strides = dict(zip(STRIDES, (stride for x in (dq, dk, dv) for stride in x.stride()[:2]), strict=True))
    q_groups, k_groups = (triton.cdiv(count, constants["BLOCK_H"]) for count in (heads, kv_heads))
    groups, count = q_groups + k_groups, triton.cdiv(tokens, constants["TOKENS"])
    copies = copied * triton.cdiv(tokens, constants["VALUES"]) * k_groups
    inputs = (dq, dk, dv, target, cos, sin, factor)
    if norm is None or rstd is None or grads is None:
        grid = (count * groups + copies,)
        _backward[grid](*inputs, cos, cos, cos, cos, tokens, count, **strides, **constants, NORM=False)
        return
    count = min(count, max(1, programs(target.device, each) // groups))
    partials = torch.empty(count * q_groups, 2, size, dtype=torch.float32, device=target.device)
    inputs += (norm.q_weight, norm.k_weight, rstd, partials)
    _backward[(count * groups + copies,)](*inputs, tokens, count, **strides, **constants, NORM=True)
    add_partials(partials, grads)


def _whole_norms(qkv: Tensor, keys: int, norm: QKNorm) -> tuple[Tensor, Tensor]:
    """The normed queries and keys [T, (H + K) C], and 1 / rms [T, 2]. `keys`: the columns of the keys."""
    widths = qkv.shape[1] - 2 * keys, keys
    normed = qkv.new_empty(len(qkv), sum(widths))
    parts = zip(qkv[:, : sum(widths)].split(widths, 1), normed.split(widths, 1), norm[:2], strict=True)
    return normed, torch.stack([rms_norm_rows_triton(x, weight, norm.eps, out) for x, out, weight in parts], 1)


def _whole_norms_backward(
    dnormed: Tensor,
    dv: Tensor,
    qkv: Tensor,
    norm: QKNorm,
    rstd: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """The gradient of the product, written over it, from those of the normed queries and keys and of the values."""
    keys = dv.shape[1] * dv.shape[2]
    widths = dnormed.shape[1] - keys, keys
    dys, (q, k, v) = dnormed.split(widths, 1), qkv.split((*widths, keys), 1)
    for dy, x, weight, each, grad in zip(dys, (q, k), norm[:2], rstd.unbind(1), grads, strict=True):
        rms_norm_rows_backward_triton(dy, x, weight, each.contiguous(), grad)
    v.view(dv.shape).copy_(dv)
    return qkv


def _tables(rotation: Rotation | None, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """The tables, the factor of queries, and the tables' columns, R / 2; without a rotation any tensors, and 0."""
    if rotation is None:
        return qkv, qkv, None, 0
    assert all(table.is_contiguous() for table in rotation if table is not None)
    return rotation.cos, rotation.sin, rotation.query_factor, rotation.cos.shape[1]


def _tile(heads: int, size: int) -> dict[str, Any]:
    """Heads and columns that a program of forward has in registers at a time: 8 elements of each half a thread.

    A tile is never smaller than the program's threads, unless these are one warp: were an element held by several
    warps, one could read it after another has written over it.
    """
    columns = power_of_2(size // 2)
    block = max(1, min(power_of_2(heads), 1024 // columns))
    return {"HALF": size // 2, "BLOCK_H": block, "BLOCK_C": columns, "num_warps": max(1, block * columns // 256)}


def _backward_sizes(heads: int, kv_heads: int, size: int, norm: bool, pairs: int) -> tuple[dict[str, Any], int]:
    """Backward's constants, and the programs per multiprocessor that share the queries and keys if there are norms.

    A tile is TOKENS tokens and BLOCK_H heads, in registers, and as in `_tile` never smaller than the program's threads:
    with norms 4 elements of each half a thread, which lets 32 warps on a multiprocessor, else 8. Held to the registers
    that they have, the compiler issues all loads of a tile at once; else it saves registers by awaiting some before it
    issues others. Tiles of long heads of which a part is rotated are half as large, because larger ones spill. VALUES
    tokens are copied at a time, 32 elements a thread.
    """
    columns = power_of_2(size // 2)
    share = 2 if columns > 64 and 0 < pairs < size // 2 else 1
    block = max(1, min(power_of_2(heads), max(4, power_of_2(kv_heads)), 8, 1024 // columns))
    tokens = max(1, 1024 // (share * block * columns))
    warps = max(1, tokens * block * columns // (128 if norm else 256))
    sizes = {"TOKENS": tokens, "BLOCK_H": block, "VALUES": max(1, 512 * warps // (block * columns))}
    return sizes | {"HALF": size // 2, "BLOCK_C": columns, "num_warps": warps, "maxnreg": 64}, 4 * share


@jit
def _rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@jit
def _columns(half, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """The column of a head's first values, and the distance from it to that of the second ones.

    The PAIRS that are rotated come first. Columns that are not rotated are taken in pairs as well.
    """
    first, distance = half, HALF
    if PAIRS > 0 and PAIRS < HALF:
        first = tl.where(half < PAIRS, half, half + PAIRS)
        distance = tl.where(half < PAIRS, PAIRS, HALF - PAIRS)
    return first, distance


@jit
def _weights(weight, half, HALF: tl.constexpr, PAIRS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """The norm's factors of the first and of the second values."""
    column, distance = _columns(half, HALF, PAIRS)
    first = tl.load(weight + column, mask=half < HALF, other=0).to(tl.float32)[None, :]
    second = tl.load(weight + column + distance, mask=half < HALF, other=0).to(tl.float32)[None, :]
    if ZERO_CENTERED:
        first, second = first + 1, second + 1
    return first, second


@jit
def _rotated(first, second, cos, sin, half, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """The rotated values, and those that are not rotated as they are, whatever they are."""
    one, other = _rotate(first, second, cos, sin)
    if PAIRS < HALF:
        rotates = (half < PAIRS)[None, :]
        one, other = tl.where(rotates, one, first), tl.where(rotates, other, second)
    return one, other


@jit
def _halves(pointer, head, stride, half, first, COUNT: tl.constexpr, HALF: tl.constexpr):
    """Where the first values of some heads lie, and which of them there are."""
    at = head[:, None] * stride + first[None, :]
    return pointer + at, (head < COUNT)[:, None] & (half < HALF)[None, :]


@jit
def _heads(
    source, target, scales, weight, rstd, eps, cos, sin, factor, half,
    COUNT: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of all queries or all keys of a token, or neither for values; then their scales, if any.

    Heads of `source` are STRIDE apart.
    """
    dtype = source.dtype.element_ty
    column, distance = _columns(half, HALF, PAIRS)
    w_first, w_second = 1.0, 1.0
    if NORM:
        w_first, w_second = _weights(weight, half, HALF, PAIRS, ZERO_CENTERED)
    for start in range(0, COUNT, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H)
        place, there = _halves(source, head, STRIDE, half, column, COUNT, HALF)
        first = tl.load(place, mask=there, other=0).to(tl.float32)
        second = tl.load(place + distance, mask=there, other=0).to(tl.float32)
        if NORM:
            inverse_rms = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)
            tl.store(rstd + head, inverse_rms, mask=head < COUNT)
            first, second = first * inverse_rms[:, None], second * inverse_rms[:, None]
            if not ZERO_CENTERED:
                first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
            first, second = first * w_first, second * w_second
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        if PAIRS > 0:
            first, second = _rotated(first, second, cos, sin, half, HALF, PAIRS)
            if factor is not None:
                first, second = first * factor, second * factor
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        if scales is not None:
            power = power_below(tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1)))
            tl.store(scales + head * tl.num_programs(0), power, mask=head < COUNT)
            first, second = first * inverse(power)[:, None], second * inverse(power)[:, None]
        place, there = _halves(target, head, 2 * HALF, half, column, COUNT, HALF)
        tl.store(place, first.to(target.dtype.element_ty), mask=there)
        tl.store(place + distance, second.to(target.dtype.element_ty), mask=there)


@jit
def _forward(
    qk, values, q, k, v, scales, cos, sin, query_factor, q_weight, k_weight, rstd, eps, q_stride, k_stride,
    H: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, ROW: tl.constexpr, V_ROW: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, ZERO_CENTERED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A token a program. Where q, k and v are views of what is read, each tile is read before it is written.

    Rows of `qk` begin with queries and keys, if GATED with a gate behind each query; rows of `values` and `v` are V_ROW
    apart. `scales` [H + 2K, T] are those of ScaledHeads; without them values stay as they are.
    """
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, BLOCK_C)
    c, s = 1.0, 0.0
    if PAIRS > 0:
        c = tl.load(cos + token * PAIRS + half, mask=half < PAIRS, other=0).to(tl.float32)[None, :]
        s = tl.load(sin + token * PAIRS + half, mask=half < PAIRS, other=0).to(tl.float32)[None, :]
    factor = None
    if query_factor is not None:
        factor = tl.load(query_factor + token).to(tl.float32)
    qk += token * ROW
    rstd += token * (H + K)
    k_scales, v_scales = None, None
    if scales is not None:
        scales += token
        k_scales = scales + H * tl.num_programs(0)
        v_scales = k_scales + K * tl.num_programs(0)
    HEAD: tl.constexpr = 2 * HALF
    Q_HEAD: tl.constexpr = 2 * HEAD if GATED else HEAD
    _heads(
        qk, q + token * q_stride, scales, q_weight, rstd, eps, c, s, factor, half,
        H, HALF, PAIRS, BLOCK_H, NORM, ZERO_CENTERED, Q_HEAD,
    )  # fmt: skip
    qk += H * Q_HEAD
    _heads(
        qk, k + token * k_stride, k_scales, k_weight, rstd + H, eps, c, s, None, half,
        K, HALF, PAIRS, BLOCK_H, NORM, ZERO_CENTERED, HEAD,
    )  # fmt: skip
    if scales is not None:
        values += token * V_ROW
        _heads(
            values, v + token * V_ROW, v_scales, k_weight, rstd, eps, c, s, None, half,
            K, HALF, 0, BLOCK_H, False, False, HEAD,
        )  # fmt: skip


@jit
def _copy(
    source, token_stride, head_stride, target, start, first_head, tokens,
    COUNT: tl.constexpr, ROW: tl.constexpr,
    HALF: tl.constexpr, VALUES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradients of some heads' values, for some tokens."""
    row, column = tl.arange(0, VALUES * BLOCK_H), tl.arange(0, 2 * BLOCK_C)
    token, head = row // BLOCK_H, first_head + row % BLOCK_H
    there = ((start + token < tokens) & (head < COUNT))[:, None] & (column < 2 * HALF)[None, :]
    taken = (token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride)[:, None] + column[None, :]
    placed = (token * ROW + head * (2 * HALF))[:, None] + column[None, :]
    values = tl.load(source + start * token_stride + taken, mask=there)
    tl.store(target + start * ROW + placed, values, mask=there)


@jit
def _heads_backward(
    source, token_stride, head_stride, target, weight, rstd, cos, sin, factor, totals,
    program, count, first_head, tokens,
    COUNT: tl.constexpr, ROW: tl.constexpr, STATS: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr,
    HALF: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of some heads' queries or keys over their values, for every count-th tile of tokens.

    Heads of `target` are STRIDE apart. The gradient of the norm's weight stays in registers by the tile's rows until
    the end.
    """
    row, half = tl.arange(0, TOKENS * BLOCK_H), tl.arange(0, BLOCK_C)
    token, head = row // BLOCK_H, first_head + row % BLOCK_H
    column, distance = _columns(half, HALF, PAIRS)
    taken = (token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride)[:, None] + column[None, :]
    placed = (token * ROW + head * STRIDE)[:, None] + column[None, :]
    angle = (token * PAIRS)[:, None] + half[None, :]
    w_first, w_second = 1.0, 1.0
    if NORM:
        w_first, w_second = _weights(weight, half, HALF, PAIRS, ZERO_CENTERED)
    total_first = tl.zeros((TOKENS * BLOCK_H, BLOCK_C), tl.float32)
    total_second = total_first
    for start in range(program * TOKENS, tokens, count * TOKENS):
        inside = (start + token < tokens) & (head < COUNT)
        there = inside[:, None] & (half < HALF)[None, :]
        gradient, place = source + start * token_stride + taken, target + start * ROW + placed
        first = tl.load(gradient, mask=there, other=0).to(tl.float32)
        second = tl.load(gradient + distance, mask=there, other=0).to(tl.float32)
        if PAIRS > 0:
            tabled = inside[:, None] & (half < PAIRS)[None, :]
            c = tl.load(cos + start * PAIRS + angle, mask=tabled, other=0).to(tl.float32)
            s = tl.load(sin + start * PAIRS + angle, mask=tabled, other=0).to(tl.float32)
            first, second = _rotated(first, second, c, -s, half, HALF, PAIRS)
            if factor is not None:
                f = tl.load(factor + start + token, mask=inside, other=0).to(tl.float32)[:, None]
                first, second = first * f, second * f
        if NORM:
            inverse = tl.load(rstd + start * STATS + (token * STATS + head), mask=inside, other=0)[:, None]
            normed_first = tl.load(place, mask=there, other=0).to(tl.float32) * inverse
            normed_second = tl.load(place + distance, mask=there, other=0).to(tl.float32) * inverse
            total_first += first * normed_first
            total_second += second * normed_second
            first, second = first * w_first, second * w_second
            mean = (tl.sum(first * normed_first + second * normed_second, 1) / (2 * HALF))[:, None]
            first, second = (first - normed_first * mean) * inverse, (second - normed_second * mean) * inverse
        tl.store(place, first.to(target.dtype.element_ty), mask=there)
        tl.store(place + distance, second.to(target.dtype.element_ty), mask=there)
    if NORM:
        tl.store(totals + column, tl.sum(total_first, 0), mask=half < HALF)
        tl.store(totals + column + distance, tl.sum(total_second, 0), mask=half < HALF)


@jit
def _backward(
    dq, dk, dv, qkv, cos, sin, query_factor, q_weight, k_weight, rstd, partials, tokens, count,
    dq_token, dq_head, dk_token, dk_head, dv_token, dv_head,
    H: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, ROW: tl.constexpr,
    HALF: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A program has a group of heads of q, k or v alone. Its loads are not held up by stores of the others.

    `count` programs share the tokens of each group of q and k; the rest copy a tile of v each. With norms a program of
    q or k leaves its sum in partials [count, groups of q, 2, C]; where k has no such group, that of q leaves zeros.
    """
    Q_GROUPS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    K_GROUPS: tl.constexpr = (K + BLOCK_H - 1) // BLOCK_H
    GROUPS: tl.constexpr = Q_GROUPS + K_GROUPS
    HEAD: tl.constexpr = 2 * HALF
    Q_HEAD: tl.constexpr = 2 * HEAD if GATED else HEAD
    copy = tl.program_id(0) - count * GROUPS
    group, program = tl.program_id(0) % GROUPS, (tl.program_id(0) // GROUPS).to(tl.int64)
    totals = partials + program * (Q_GROUPS * 4 * HALF)
    if copy >= 0:
        start, first_head = (copy // K_GROUPS).to(tl.int64) * VALUES, copy % K_GROUPS * BLOCK_H
        values = qkv + H * Q_HEAD + K * HEAD
        _copy(dv, dv_token, dv_head, values, start, first_head, tokens, K, ROW, HALF, VALUES, BLOCK_H, BLOCK_C)
    elif group < Q_GROUPS:
        totals += group * (4 * HALF)
        _heads_backward(
            dq, dq_token, dq_head, qkv, q_weight, rstd, cos, sin, query_factor, totals,
            program, count, group * BLOCK_H, tokens,
            H, ROW, H + K, NORM, PAIRS, HALF, TOKENS, BLOCK_H, BLOCK_C, ZERO_CENTERED, Q_HEAD,
        )  # fmt: skip
        if NORM and group >= K_GROUPS:
            column = tl.arange(0, 2 * BLOCK_C)
            tl.store(totals + 2 * HALF + column, tl.zeros((2 * BLOCK_C,), tl.float32), mask=column < 2 * HALF)
    else:
        group -= Q_GROUPS
        totals += group * (4 * HALF) + 2 * HALF
        _heads_backward(
            dk, dk_token, dk_head, qkv + H * Q_HEAD, k_weight, rstd + H, cos, sin, None, totals,
            program, count, group * BLOCK_H, tokens,
            K, ROW, H + K, NORM, PAIRS, HALF, TOKENS, BLOCK_H, BLOCK_C, ZERO_CENTERED, HEAD,
        )  # fmt: skip
