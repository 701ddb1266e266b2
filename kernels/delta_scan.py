"""The gated delta rule as Triton kernels: a scan over chunks of tokens, forward and backward.

In a chunk of L tokens, with d the running sum of its decays, S the state before it, and k, v, q, b (beta) as matrices of
its tokens, what the tokens write to the state (arXiv 2412.06464, 3.3) is the solution of a triangular system:

    (I + A) W = M,  M_i = b_i (v_i - exp(d_i) S^T k_i),  A_ij = b_i k_i.k_j exp(d_i - d_j) for j < i
    o_i = C^-0.5 exp(d_i) S^T q_i + sum_j P_ij W_j,      P_ij = C^-0.5 q_i.k_j exp(d_i - d_j) for j <= i
    S  <- exp(d_L) S + sum_j exp(d_L - d_j) k_j W_j^T

`_prepare` computes A and P of all chunks, `_invert` (I + A)^-1, and `_scan` goes over the chunks of a document. Backward,
`_scan_backward` goes over them in reverse, with the gradient of the state, and leaves that of M. From it, `_pair_gradients`
computes W again and the gradients of P and A, and `_query_gradients` and `_key_gradients` the rest, a program for some
columns of the value heads that read a key head.

Operands of products are in the type of q; sums and states are float32. The state is kept transposed, [V, C], so that
the products that depend on it have it, and what follows from it, in registers. The states before chunks are stored
where a multiple of L lies among the L tokens before the chunk: never more than T / L, as a document's first chunk has
none. No result depends on other documents, or on the place of a document among the tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.batch import CHUNK, Documents
from rptrain.kernels.launch import jit, power_of_2, tl, triton
from rptrain.kernels.target import KB, target_of

BLOCK = 16  # rows of the diagonal blocks that `_invert` inverts directly


class Kept(NamedTuple):
    """What backward needs of forward."""

    sums: Tensor  # [T, H], the running sums of decays in each chunk, float32
    inverses: Tensor  # [T, H, L], (I + A)^-1
    states: Tensor  # [T / L, H, V, C], before each chunk that is not a document's first


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Documents,
    initial: Tensor | None,
    *,
    final: bool,
) -> tuple[Tensor, Tensor | None, Kept]:
    """As kernels/delta_rule.py, with the states behind each document [documents, H, C, V] if `final`."""
    tokens, heads, columns = v.shape
    size, count = q.shape[2], len(documents.first) - 1
    interactions = torch.empty(tokens, heads, CHUNK, dtype=torch.float32, device=q.device)
    scores, sums = prepare(q, k, decay, beta, documents, interactions)
    inverses = torch.empty_like(scores)
    _invert[len(documents.starts), heads](
        interactions, inverses, documents.starts, documents.ends, H=heads, L=CHUNK, B=BLOCK, num_warps=2
    )
    del interactions
    out = torch.empty_like(v)
    states = torch.empty(-(-tokens // CHUNK), heads, columns, size, dtype=q.dtype, device=q.device)
    last = q.new_empty(count, heads, size, columns, dtype=torch.float32) if final else None
    options, block = _scan_options(q, columns)
    _scan[heads * triton.cdiv(columns, block), count](
        q, k, v, inverses, scores, sums, beta, out, states, initial, last, documents.cu_seqlens,
        size**-0.5, HAS_INITIAL=initial is not None, HAS_LAST=final, BV=block, **_constants(q, v), **options,
    )  # fmt: skip
    return out, last, Kept(sums, inverses, states)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, kept: Kept, documents: Documents
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, decay and beta."""
    heads, columns = v.shape[1:]
    constants = _constants(q, v)
    scores, _ = prepare(q, k, decay, beta, documents, None)
    dwanted, dstates = torch.empty_like(v), torch.empty_like(kept.states)
    options, block = _scan_options(q, columns)
    _scan_backward[heads * triton.cdiv(columns, block), len(documents.first) - 1](
        dout, q, k, kept.inverses, scores, kept.sums, beta, dwanted, dstates, documents.cu_seqlens,
        q.shape[2] ** -0.5, BV=block, **constants, **options,
    )  # fmt: skip
    del scores
    written, dv = torch.empty_like(v), torch.empty_like(v)
    dscores, dinteractions = torch.empty_like(kept.inverses), torch.empty_like(kept.inverses)
    ddecay, dbeta = torch.empty_like(decay), torch.empty_like(beta)
    chunks, places = len(documents.starts), (documents.starts, documents.ends, documents.document, documents.cu_seqlens)
    scale = q.shape[2] ** -0.5
    options = _gradient_options(q, constants["CB"], columns)
    _pair_gradients[chunks, heads](
        dout, k, v, kept.inverses, kept.sums, beta, kept.states, dwanted,
        written, dscores, dinteractions, dv, dbeta, *places, scale, BV=options.values, **constants, **options.pairs,
    )  # fmt: skip
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    parts = constants["CB"] // options.columns
    dsums, dbetas = (decay.new_empty(parts, *decay.shape) for _ in range(2))
    blocks: dict[str, Any] = {"BV": options.values, "BC": options.columns, **constants, **options.columns_launch}
    _query_gradients[chunks, q.shape[1] * parts](
        dout, q, k, kept.sums, kept.states, dscores, dq, dsums, *places, scale, len(q), **blocks
    )
    _key_gradients[chunks, q.shape[1] * parts](
        q, k, kept.sums, beta, kept.states, dwanted, dstates, written, dscores, dinteractions, dk, dsums, dbetas,
        *places, len(q), **blocks,
    )  # fmt: skip
    _decay_gradients[chunks, triton.cdiv(heads, 16)](
        dsums, dbetas, ddecay, dbeta, documents.starts, documents.ends, len(q),
        PARTS=parts, H=heads, L=CHUNK, HB=16, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv, ddecay, dbeta


def prepare(
    q: Tensor, k: Tensor, decay: Tensor, beta: Tensor, documents: Documents, interactions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """P [T, H, L], in the type of q, and the running sums of decays; writes A to `interactions`, if given."""
    tokens, heads = decay.shape
    scores = torch.empty(tokens, heads, CHUNK, dtype=q.dtype, device=q.device)
    sums = torch.empty_like(decay)
    _prepare[len(documents.starts), q.shape[1]](
        q, k, decay, beta, documents.starts, documents.ends, interactions, scores, sums,
        q.shape[2] ** -0.5, HAS_INTERACTIONS=interactions is not None, K=q.shape[1], H=heads, C=q.shape[2],
        L=CHUNK, CB=max(16, power_of_2(q.shape[2])), PRECISION=_precision(q), num_warps=4,
    )  # fmt: skip
    return scores, sums


def _precision(x: Tensor) -> str:
    """How products of float32 are computed."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _constants(q: Tensor, v: Tensor) -> dict[str, Any]:
    _, keys, size = q.shape
    # with smaller tiles of 16 bits, Triton 3.6 compiles wrong products for Hopper
    block = max(16 if q.dtype == torch.float32 else 128, power_of_2(size))
    return {"K": keys, "H": v.shape[1], "C": size, "V": v.shape[2], "CB": block, "L": CHUNK, "PRECISION": _precision(q)}


def _scan_options(q: Tensor, columns: int) -> tuple[dict[str, int], int]:
    """How the scans are launched, and the columns of values of a program."""
    if q.dtype == torch.float32:
        return {"num_warps": 4, "STAGES": 1}, 16
    large = target_of(q.device).shared_memory >= 227 * KB
    return {"num_warps": 8, "STAGES": 3 if large else 1}, 64


class Blocks(NamedTuple):
    """The columns of values, and of keys, in the tiles of the gradients' programs, and how these are launched."""

    values: int
    columns: int
    pairs: dict[str, int]
    columns_launch: dict[str, int]


def _gradient_options(q: Tensor, size: int, columns: int) -> Blocks:
    launch = {"num_warps": 4, "num_stages": 1}
    if q.dtype == torch.float32:
        return Blocks(16, min(32, size), launch, launch)
    return Blocks(64, min(64, size), launch, launch)


@jit
def _tile(base, start, step, here, stride, column, columns):
    """Rows of a matrix, from row `start`, and some of its columns; zeros outside."""
    place = step[:, None] * stride + column[None, :]
    return tl.load(base + start * stride + place, mask=here[:, None] & (column < columns)[None, :], other=0.0)


@jit
def _store_tile(base, x, start, step, here, stride, column, columns):
    place = step[:, None] * stride + column[None, :]
    tl.store(base + start * stride + place, x, mask=here[:, None] & (column < columns)[None, :])


@jit
def _state(base, place, value, column, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, inside):
    """Some values of a stored state [V, C] of a head, whose part of `base` it is; zeros unless `inside`."""
    mask = (value < V)[:, None] & (column < C)[None, :] & inside
    return tl.load(base + place * (H * V * C) + value[:, None] * C + column[None, :], mask=mask, other=0.0)


@jit
def _prepare(
    q, k, decay, beta, starts, ends, interactions, scores, sums, scale, HAS_INTERACTIONS: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr, CB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + chunk).to(tl.int64), tl.load(ends + chunk).to(tl.int64)
    if start == end:
        return
    step, column = tl.arange(0, L), tl.arange(0, CB)
    row, here = start + step, start + step < end
    k_LC = _tile(k + key_head * C, start, step, here, K * C, column, C)
    q_LC = _tile(q + key_head * C, start, step, here, K * C, column, C)
    of_keys = tl.dot(k_LC, tl.trans(k_LC), input_precision=PRECISION)
    of_queries = tl.dot(q_LC, tl.trans(k_LC), input_precision=PRECISION) * scale
    for repeat in range(H // K):
        head = key_head * (H // K) + repeat
        since = tl.cumsum(tl.load(decay + row * H + head, mask=here, other=0.0), 0)
        tl.store(sums + row * H + head, since, mask=here)
        between = tl.where(step[:, None] >= step[None, :], since[:, None] - since[None, :], float("-inf"))
        factors = tl.exp(between)
        _store_tile(scores + head * L, of_queries * factors, start, step, here, H * L, step, L)
        if HAS_INTERACTIONS:
            b = tl.load(beta + row * H + head, mask=here, other=0.0)
            a = tl.where(step[:, None] > step[None, :], b[:, None] * of_keys * factors, 0.0)
            _store_tile(interactions + head * L, a, start, step, here, H * L, step, L)


@jit
def _block(base, start, end, i: tl.constexpr, j: tl.constexpr, H: tl.constexpr, L: tl.constexpr, B: tl.constexpr):
    """Block (i, j) of a chunk's matrix."""
    row = start + i * B + tl.arange(0, B)
    return tl.load(
        base + row[:, None] * (H * L) + j * B + tl.arange(0, B)[None, :], mask=(row < end)[:, None], other=0.0
    )


@jit
def _store_block(
    base, x, start, end, i: tl.constexpr, j: tl.constexpr, H: tl.constexpr, L: tl.constexpr, B: tl.constexpr
):
    row = start + i * B + tl.arange(0, B)
    tl.store(base + row[:, None] * (H * L) + j * B + tl.arange(0, B)[None, :], x, mask=(row < end)[:, None])


@jit
def _times(x, y):
    return tl.dot(x, y, input_precision="tf32x3")


@jit
def _invert(interactions, inverses, starts, ends, H: tl.constexpr, L: tl.constexpr, B: tl.constexpr):
    """The inverse of I + A by blocks: those on the diagonal row by row, those below them by substitution."""
    tl.static_assert(L == 4 * B)
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + chunk).to(tl.int64), tl.load(ends + chunk).to(tl.int64)
    if start == end:
        return
    a, out = interactions + head * L, inverses + head * L
    block, step = tl.arange(0, L // B), tl.arange(0, B)
    # rows of all four diagonal blocks at once: row i of the inverse is e_i - sum_j a_ij row j
    inverse = tl.where((step[:, None] == step[None, :])[None, :, :], 1.0, tl.zeros((L // B, B, B), tl.float32))
    for i in tl.static_range(1, B):
        row = start + block * B + i
        a_i = tl.load(
            a + row[:, None] * (H * L) + (block * B)[:, None] + step[None, :], mask=(row < end)[:, None], other=0.0
        )
        row_i = tl.sum(a_i[:, :, None] * inverse, 1)
        inverse = tl.where((step == i)[None, :, None], inverse - row_i[:, None, :], inverse)
    t00 = tl.sum(tl.where((block == 0)[:, None, None], inverse, 0.0), 0)
    t11 = tl.sum(tl.where((block == 1)[:, None, None], inverse, 0.0), 0)
    t22 = tl.sum(tl.where((block == 2)[:, None, None], inverse, 0.0), 0)
    t33 = tl.sum(tl.where((block == 3)[:, None, None], inverse, 0.0), 0)
    a10, a20, a30 = (
        _block(a, start, end, 1, 0, H, L, B),
        _block(a, start, end, 2, 0, H, L, B),
        _block(a, start, end, 3, 0, H, L, B),
    )
    a21, a31, a32 = (
        _block(a, start, end, 2, 1, H, L, B),
        _block(a, start, end, 3, 1, H, L, B),
        _block(a, start, end, 3, 2, H, L, B),
    )
    t10 = -_times(t11, _times(a10, t00))
    t21 = -_times(t22, _times(a21, t11))
    t32 = -_times(t33, _times(a32, t22))
    t20 = -_times(t22, _times(a20, t00) + _times(a21, t10))
    t31 = -_times(t33, _times(a31, t11) + _times(a32, t21))
    t30 = -_times(t33, _times(a30, t00) + _times(a31, t10) + _times(a32, t20))
    zero = tl.zeros((B, B), tl.float32)
    _store_block(out, t00, start, end, 0, 0, H, L, B)
    _store_block(out, zero, start, end, 0, 1, H, L, B)
    _store_block(out, zero, start, end, 0, 2, H, L, B)
    _store_block(out, zero, start, end, 0, 3, H, L, B)
    _store_block(out, t10, start, end, 1, 0, H, L, B)
    _store_block(out, t11, start, end, 1, 1, H, L, B)
    _store_block(out, zero, start, end, 1, 2, H, L, B)
    _store_block(out, zero, start, end, 1, 3, H, L, B)
    _store_block(out, t20, start, end, 2, 0, H, L, B)
    _store_block(out, t21, start, end, 2, 1, H, L, B)
    _store_block(out, t22, start, end, 2, 2, H, L, B)
    _store_block(out, zero, start, end, 2, 3, H, L, B)
    _store_block(out, t30, start, end, 3, 0, H, L, B)
    _store_block(out, t31, start, end, 3, 1, H, L, B)
    _store_block(out, t32, start, end, 3, 2, H, L, B)
    _store_block(out, t33, start, end, 3, 3, H, L, B)


@jit
def _scan(
    q, k, v, inverses, scores, sums, beta, out, states, initial, last, cu_seqlens, scale,
    HAS_INITIAL: tl.constexpr, HAS_LAST: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for BV columns of the values of a head in a document."""
    parts: tl.constexpr = (V + BV - 1) // BV
    head, document = tl.program_id(0) // parts, tl.program_id(1)
    begin, stop = tl.load(cu_seqlens + document).to(tl.int64), tl.load(cu_seqlens + document + 1).to(tl.int64)
    key_head = head // (H // K)
    step, column = tl.arange(0, L), tl.arange(0, CB)
    value = tl.program_id(0) % parts * BV + tl.arange(0, BV)
    in_state = (value < V)[:, None] & (column < C)[None, :]
    zero = tl.zeros((BV, 1), tl.int64)  # the interpreter has no masks of a single truth
    dtype: tl.constexpr = q.dtype.element_ty
    place = document.to(tl.int64) * (H * C * V) + head * (C * V) + column[None, :] * V + value[:, None]
    if HAS_INITIAL:
        state = tl.load(initial + place, mask=in_state, other=0.0)
    else:
        state = tl.zeros((BV, CB), tl.float32)
    for start in tl.range(begin, stop, L, num_stages=STAGES):
        row, here = start + step, start + step < stop
        k_LC = _tile(k + key_head * C, start, step, here, K * C, column, C)
        q_LC = _tile(q + key_head * C, start, step, here, K * C, column, C)
        v_LV = _tile(v + head * V, start, step, here, H * V, value, V)
        inverse = _tile(inverses + head * L, start, step, here, H * L, step, L)
        score = _tile(scores + head * L, start, step, here, H * L, step, L)
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        whole = tl.load(sums + (tl.minimum(start + L, stop) - 1) * H + head)
        b = tl.load(beta + row * H + head, mask=here, other=0.0)

        before = state.to(dtype)
        at = ((start + L - 1) // L - 1) * (H * V * C) + head * (V * C)
        tl.store(states + at + value[:, None] * C + column[None, :], before, mask=in_state & (zero + start > begin))
        factor = tl.exp(since)
        read = tl.dot(before, tl.trans(k_LC), input_precision=PRECISION)
        wanted = (tl.trans(v_LV).to(tl.float32) - read * factor[None, :]) * b[None, :]
        written = tl.dot(wanted.to(dtype), tl.trans(inverse), input_precision=PRECISION)
        o = tl.dot(before, tl.trans(q_LC), input_precision=PRECISION) * (factor * scale)[None, :]
        o = tl.dot(written.to(dtype), tl.trans(score), o, input_precision=PRECISION)
        _store_tile(out + head * V, tl.trans(o), start, step, here, H * V, value, V)
        decayed = (written * tl.exp(whole - since)[None, :]).to(dtype)
        state = tl.dot(decayed, k_LC, state * tl.exp(whole), input_precision=PRECISION)
    if HAS_LAST:
        tl.store(last + place, state, mask=in_state)


@jit
def _scan_backward(
    dout, q, k, inverses, scores, sums, beta, dwanted, dstates, cu_seqlens, scale,
    BV: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_scan`, from a document's last chunk to its first; writes the gradients of M and of states behind chunks."""
    parts: tl.constexpr = (V + BV - 1) // BV
    head, document = tl.program_id(0) // parts, tl.program_id(1)
    begin, stop = tl.load(cu_seqlens + document).to(tl.int64), tl.load(cu_seqlens + document + 1).to(tl.int64)
    key_head = head // (H // K)
    step, column = tl.arange(0, L), tl.arange(0, CB)
    value = tl.program_id(0) % parts * BV + tl.arange(0, BV)
    in_state = (value < V)[:, None] & (column < C)[None, :]
    zero = tl.zeros((BV, 1), tl.int64)  # the interpreter has no masks of a single truth
    dtype: tl.constexpr = q.dtype.element_ty
    chunks = tl.cdiv(stop - begin, L)
    dstate = tl.zeros((BV, CB), tl.float32)
    for index in tl.range(0, chunks, num_stages=STAGES):
        start = begin + (chunks - 1 - index) * L
        row, here = start + step, start + step < stop
        k_LC = _tile(k + key_head * C, start, step, here, K * C, column, C)
        q_LC = _tile(q + key_head * C, start, step, here, K * C, column, C)
        dout_LV = _tile(dout + head * V, start, step, here, H * V, value, V)
        inverse = _tile(inverses + head * L, start, step, here, H * L, step, L)
        score = _tile(scores + head * L, start, step, here, H * L, step, L)
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        whole = tl.load(sums + (tl.minimum(start + L, stop) - 1) * H + head)
        b = tl.load(beta + row * H + head, mask=here, other=0.0)

        after = dstate.to(dtype)
        at = ((start + 2 * L - 1) // L - 1) * (H * V * C) + head * (V * C)
        tl.store(dstates + at + value[:, None] * C + column[None, :], after, mask=in_state & (zero + index > 0))
        factor = tl.exp(since)
        dwritten = tl.dot(after, tl.trans(k_LC), input_precision=PRECISION) * tl.exp(whole - since)[None, :]
        dwritten = tl.dot(tl.trans(dout_LV), score, dwritten, input_precision=PRECISION)
        d = tl.dot(dwritten.to(dtype), inverse, input_precision=PRECISION)
        _store_tile(dwanted + head * V, tl.trans(d), start, step, here, H * V, value, V)
        read = (tl.trans(dout_LV).to(tl.float32) * (factor * scale)[None, :]).to(dtype)
        dstate = tl.dot(read, q_LC, dstate * tl.exp(whole), input_precision=PRECISION)
        dstate = tl.dot((-d * (factor * b)[None, :]).to(dtype), k_LC, dstate, input_precision=PRECISION)


@jit
def _pair_gradients(
    dout, k, v, inverses, sums, beta, states, dwanted, written, dscores, dinteractions, dv, dbeta,
    starts, ends, documents, cu_seqlens, scale, BV: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """W, the gradients of products of queries or keys with keys, and those of values, of a chunk and a value head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + chunk).to(tl.int64), tl.load(ends + chunk).to(tl.int64)
    if start == end:
        return
    follows = tl.zeros((BV, 1), tl.int64) + start > tl.load(cu_seqlens + tl.load(documents + chunk))
    step, column = tl.arange(0, L), tl.arange(0, CB)
    row, here = start + step, start + step < end
    dtype: tl.constexpr = k.dtype.element_ty
    k_LC = _tile(k + head // (H // K) * C, start, step, here, K * C, column, C)
    inverse = _tile(inverses + head * L, start, step, here, H * L, step, L)
    since = tl.load(sums + row * H + head, mask=here, other=0.0)
    b = tl.load(beta + row * H + head, mask=here, other=0.0)
    factor = tl.exp(since)
    ds, da = tl.zeros((L, L), tl.float32), tl.zeros((L, L), tl.float32)
    db = tl.zeros((L,), tl.float32)
    before = (start + L - 1) // L - 1  # the place of the state
    for part in range((V + BV - 1) // BV):
        value = part * BV + tl.arange(0, BV)
        state = _state(states + head * (V * C), before, value, column, H, C, V, follows)
        v_LV = _tile(v + head * V, start, step, here, H * V, value, V).to(tl.float32)
        dwanted_LV = _tile(dwanted + head * V, start, step, here, H * V, value, V)
        d = dwanted_LV.to(tl.float32)
        db += tl.sum(v_LV * d, 1)
        _store_tile(dv + head * V, d * b[:, None], start, step, here, H * V, value, V)
        read = tl.dot(k_LC, tl.trans(state), input_precision=PRECISION)
        wanted = ((v_LV - read * factor[:, None]) * b[:, None]).to(dtype)
        w = tl.dot(inverse, wanted, input_precision=PRECISION).to(dtype)
        _store_tile(written + head * V, w, start, step, here, H * V, value, V)
        dout_LV = _tile(dout + head * V, start, step, here, H * V, value, V)
        ds = tl.dot(dout_LV, tl.trans(w), ds, input_precision=PRECISION)
        da = tl.dot(dwanted_LV, tl.trans(w), da, input_precision=PRECISION)
    between = tl.where(step[:, None] >= step[None, :], since[:, None] - since[None, :], float("-inf"))
    factors = tl.exp(between)
    _store_tile(dscores + head * L, ds * factors * scale, start, step, here, H * L, step, L)
    da = tl.where(step[:, None] > step[None, :], -da * factors, 0.0)
    _store_tile(dinteractions + head * L, da, start, step, here, H * L, step, L)
    tl.store(dbeta + row * H + head, db, mask=here)


@jit
def _query_gradients(
    dout, q, k, sums, states, dscores, dq, dsums, starts, ends, documents, cu_seqlens, scale, tokens,
    BV: tl.constexpr, BC: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BC columns of the gradient of a chunk's queries of a key head; what they add to that of running sums."""
    chunk, key_head, block = tl.program_id(0), tl.program_id(1) // (CB // BC), tl.program_id(1) % (CB // BC)
    start, end = tl.load(starts + chunk).to(tl.int64), tl.load(ends + chunk).to(tl.int64)
    if start == end:
        return
    follows = tl.zeros((BV, 1), tl.int64) + start > tl.load(cu_seqlens + tl.load(documents + chunk))
    step, column = tl.arange(0, L), block * BC + tl.arange(0, BC)
    row, here = start + step, start + step < end
    k_LC = _tile(k + key_head * C, start, step, here, K * C, column, C)
    q_LC = _tile(q + key_head * C, start, step, here, K * C, column, C).to(tl.float32)
    dq_LC = tl.zeros((L, BC), tl.float32)
    before = (start + L - 1) // L - 1  # the place of the state
    of_sums = dsums + block * tokens * H + row * H + key_head * (H // K)
    for repeat in range(H // K):
        head = key_head * (H // K) + repeat
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        ds = _tile(dscores + head * L, start, step, here, H * L, step, L)
        grad = tl.zeros((L, BC), tl.float32)
        for part in range((V + BV - 1) // BV):
            value = part * BV + tl.arange(0, BV)
            dout_LV = _tile(dout + head * V, start, step, here, H * V, value, V)
            state = _state(states + head * (V * C), before, value, column, H, C, V, follows)
            grad = tl.dot(dout_LV, state, grad, input_precision=PRECISION)
        grad = tl.dot(ds, k_LC, grad * (tl.exp(since) * scale)[:, None], input_precision=PRECISION)
        tl.store(of_sums + repeat, tl.sum(q_LC * grad, 1), mask=here)
        dq_LC += grad
    _store_tile(dq + key_head * C, dq_LC, start, step, here, K * C, column, C)


@jit
def _key_gradients(
    q, k, sums, beta, states, dwanted, dstates, written, dscores, dinteractions, dk, dsums, dbetas,
    starts, ends, documents, cu_seqlens, tokens, BV: tl.constexpr, BC: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_query_gradients`, of keys; and what they add to the gradient of beta.

    The gradient of a running sum follows from those of q, k and b k, whose rows have factors of its exponential.
    """
    chunk, key_head, block = tl.program_id(0), tl.program_id(1) // (CB // BC), tl.program_id(1) % (CB // BC)
    start, end = tl.load(starts + chunk).to(tl.int64), tl.load(ends + chunk).to(tl.int64)
    if start == end:
        return
    document = tl.load(documents + chunk)
    begin, stop = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    zero, few = tl.zeros((BV, 1), tl.int64), tl.zeros((16, 1), tl.int64)  # the interpreter needs masks of this shape
    step, column = tl.arange(0, L), block * BC + tl.arange(0, BC)
    row, here = start + step, start + step < end
    dtype: tl.constexpr = q.dtype.element_ty
    k_LC = _tile(k + key_head * C, start, step, here, K * C, column, C)
    q_LC = _tile(q + key_head * C, start, step, here, K * C, column, C)
    dk_LC = tl.zeros((L, BC), tl.float32)
    before, after = (start + L - 1) // L - 1, (start + 2 * L - 1) // L - 1  # places of states
    for repeat in range(H // K):
        head = key_head * (H // K) + repeat
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        whole = tl.load(sums + (end - 1) * H + head)
        b = tl.load(beta + row * H + head, mask=here, other=0.0)
        da = _tile(dinteractions + head * L, start, step, here, H * L, step, L)
        grad = tl.zeros((L, BC), tl.float32)  # of b k, which reads the state
        for part in range((V + BV - 1) // BV):
            value = part * BV + tl.arange(0, BV)
            dwanted_LV = _tile(dwanted + head * V, start, step, here, H * V, value, V)
            state = _state(states + head * (V * C), before, value, column, H, C, V, zero + start > begin)
            grad = tl.dot(dwanted_LV, state, grad, input_precision=PRECISION)
        grad = tl.dot(da, k_LC, -grad * tl.exp(since)[:, None], input_precision=PRECISION)
        of_beta = tl.sum(k_LC.to(tl.float32) * grad, 1)
        dk_LC += grad * b[:, None]

        of_states = 0.0
        for part in range((V + 15) // 16):
            value = part * 16 + tl.arange(0, 16)
            inside = (few + start > begin) & (few + end < stop)
            state = _state(states + head * (V * C), before, value, column, H, C, V, inside)
            dstate = _state(dstates + head * (V * C), after, value, column, H, C, V, inside)
            of_states += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        grad = tl.zeros((L, BC), tl.float32)  # of k, which is written to the state
        for part in range((V + BV - 1) // BV):
            value = part * BV + tl.arange(0, BV)
            w = _tile(written + head * V, start, step, here, H * V, value, V)
            dstate = _state(dstates + head * (V * C), after, value, column, H, C, V, zero + end < stop)
            grad = tl.dot(w, dstate, grad, input_precision=PRECISION)
        grad *= tl.exp(whole - since)[:, None]
        of_last = tl.sum(k_LC.to(tl.float32) * grad) + tl.exp(whole) * of_states
        ds = _tile(dscores + head * L, start, step, here, H * L, step, L)
        grad = tl.dot(tl.trans(ds), q_LC, grad, input_precision=PRECISION)
        by_beta = (da.to(tl.float32) * b[:, None]).to(dtype)
        grad = tl.dot(tl.trans(by_beta), k_LC, grad, input_precision=PRECISION)
        dk_LC += grad
        place = block * tokens * H + row * H + head
        of_sums = tl.load(dsums + place, mask=here, other=0.0) + b * of_beta - tl.sum(k_LC.to(tl.float32) * grad, 1)
        tl.store(dsums + place, of_sums + tl.where(row == end - 1, of_last, 0.0), mask=here)
        tl.store(dbetas + place, of_beta, mask=here)
    _store_tile(dk + key_head * C, dk_LC, start, step, here, K * C, column, C)


@jit
def _decay_gradients(
    dsums, dbetas, ddecay, dbeta, starts, ends, tokens, PARTS: tl.constexpr, H: tl.constexpr, L: tl.constexpr,
    HB: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's decays from those of their running sums; adds the parts of beta's."""
    start, end = tl.load(starts + tl.program_id(0)).to(tl.int64), tl.load(ends + tl.program_id(0)).to(tl.int64)
    step, head = tl.arange(0, L), tl.program_id(1) * HB + tl.arange(0, HB)
    here = start + step < end
    sums = tl.zeros((L, HB), tl.float32)
    betas = _tile(dbeta, start, step, here, H, head, H)
    for part in range(PARTS):
        sums += _tile(dsums + part * tokens * H, start, step, here, H, head, H)
        betas += _tile(dbetas + part * tokens * H, start, step, here, H, head, H)
    later = tl.sum(sums, 0)[None, :] - tl.cumsum(sums, 0) + sums
    _store_tile(ddecay, later, start, step, here, H, head, H)
    _store_tile(dbeta, betas, start, step, here, H, head, H)
