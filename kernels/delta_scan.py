"""The gated delta rule as Triton kernels: a scan over chunks of tokens, forward and backward.

In a chunk of L tokens, with d the running sum of its decays, S the state before it, and k, v, q, b (beta) as matrices of
its tokens, what the tokens write to the state (arXiv 2412.06464, 3.3) is the solution of a triangular system:

    (I + A) W = M,  M_i = b_i (v_i - exp(d_i) S^T k_i),  A_ij = b_i k_i.k_j exp(d_i - d_j) for j < i
    o_i = C^-0.5 exp(d_i) S^T q_i + sum_j P_ij W_j,      P_ij = C^-0.5 q_i.k_j exp(d_i - d_j) for j <= i
    S  <- exp(d_L) S + sum_j exp(d_L - d_j) k_j W_j^T

`_prepare` computes A and P of all chunks, `_invert` (I + A)^-1, and `_scan` goes over the chunks of a document. Backward,
`_scan_backward` goes over them in reverse, with the gradient of the state, and leaves that of M; `_gradients` computes
the gradients of all chunks from it, each program for one key head and the value heads that read it.

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
        interactions, inverses, documents.starts, documents.ends, H=heads, L=CHUNK, B=BLOCK, num_warps=1
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
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    ddecay, dbeta = torch.empty_like(decay), torch.empty_like(beta)
    options, block = _gradient_options(q, columns)
    _gradients[len(documents.starts), q.shape[1]](
        dout, q, k, v, kept.inverses, kept.sums, beta, kept.states, dwanted, dstates,
        dq, dk, dv, ddecay, dbeta, documents.starts, documents.ends, documents.document, documents.cu_seqlens,
        q.shape[2] ** -0.5, BV=block, **constants, **options,
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
    block = max(16, power_of_2(size))
    return {"K": keys, "H": v.shape[1], "C": size, "V": v.shape[2], "CB": block, "L": CHUNK, "PRECISION": _precision(q)}


def _scan_options(q: Tensor, columns: int) -> tuple[dict[str, int], int]:
    """How the scans are launched, and the columns of values of a program."""
    if q.dtype == torch.float32:
        return {"num_warps": 4, "STAGES": 1}, 16
    large = target_of(q.device).shared_memory >= 227 * KB
    return {"num_warps": 4, "STAGES": 2 if large else 1}, min(64, max(16, power_of_2(columns)))


def _gradient_options(q: Tensor, columns: int) -> tuple[dict[str, int], int]:
    if q.dtype == torch.float32:
        return {"num_warps": 8}, 16
    return {"num_warps": 8}, min(64, max(16, power_of_2(columns)))


@jit
def _tile(base, row, here, stride, columns, WIDTH: tl.constexpr):
    """Rows [L, WIDTH] of a matrix; zeros outside."""
    column = tl.arange(0, WIDTH)
    return tl.load(
        base + row[:, None] * stride + column[None, :], mask=here[:, None] & (column < columns)[None, :], other=0.0
    )


@jit
def _prepare(
    q, k, decay, beta, starts, ends, interactions, scores, sums, scale, HAS_INTERACTIONS: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr, CB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + chunk).to(tl.int64), tl.load(ends + chunk).to(tl.int64)
    if start == end:
        return
    step = tl.arange(0, L)
    row, here = start + step, start + step < end
    k_LC = _tile(k + key_head * C, row, here, K * C, C, CB)
    q_LC = _tile(q + key_head * C, row, here, K * C, C, CB)
    of_keys = tl.dot(k_LC, tl.trans(k_LC), input_precision=PRECISION)
    of_queries = tl.dot(q_LC, tl.trans(k_LC), input_precision=PRECISION) * scale
    for repeat in range(H // K):
        head = key_head * (H // K) + repeat
        since = tl.cumsum(tl.load(decay + row * H + head, mask=here, other=0.0), 0)
        tl.store(sums + row * H + head, since, mask=here)
        between = tl.where(step[:, None] >= step[None, :], since[:, None] - since[None, :], float("-inf"))
        factors = tl.exp(between)
        place = (row * H + head)[:, None] * L + step[None, :]
        tl.store(scores + place, of_queries * factors, mask=here[:, None])
        if HAS_INTERACTIONS:
            b = tl.load(beta + row * H + head, mask=here, other=0.0)
            a = tl.where(step[:, None] > step[None, :], b[:, None] * of_keys * factors, 0.0)
            tl.store(interactions + place, a, mask=here[:, None])


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
    return tl.dot(x, y, input_precision="ieee")


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
        k_LC = _tile(k + key_head * C, row, here, K * C, C, CB)
        q_LC = _tile(q + key_head * C, row, here, K * C, C, CB)
        at_v = (row * (H * V) + head * V)[:, None] + value[None, :]
        in_v = here[:, None] & (value < V)[None, :]
        v_LV = tl.load(v + at_v, mask=in_v, other=0.0)
        inverse = _tile(inverses + head * L, row, here, H * L, L, L)
        score = _tile(scores + head * L, row, here, H * L, L, L)
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        whole = tl.load(sums + (tl.minimum(start + L, stop) - 1) * H + head)
        b = tl.load(beta + row * H + head, mask=here, other=0.0)

        before = state.to(dtype)
        at = ((start + L - 1) // L - 1) * (H * V * C) + head * (V * C) + value[:, None] * C + column[None, :]
        tl.store(states + at, before, mask=in_state & (zero + start > begin))
        factor = tl.exp(since)
        read = tl.dot(before, tl.trans(k_LC), input_precision=PRECISION)
        wanted = (tl.trans(v_LV).to(tl.float32) - read * factor[None, :]) * b[None, :]
        written = tl.dot(wanted.to(dtype), tl.trans(inverse), input_precision=PRECISION)
        o = tl.dot(before, tl.trans(q_LC), input_precision=PRECISION) * (factor * scale)[None, :]
        o = tl.dot(written.to(dtype), tl.trans(score), o, input_precision=PRECISION)
        tl.store(out + at_v, tl.trans(o), mask=in_v)
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
        k_LC = _tile(k + key_head * C, row, here, K * C, C, CB)
        q_LC = _tile(q + key_head * C, row, here, K * C, C, CB)
        at_v = (row * (H * V) + head * V)[:, None] + value[None, :]
        in_v = here[:, None] & (value < V)[None, :]
        dout_LV = tl.load(dout + at_v, mask=in_v, other=0.0)
        inverse = _tile(inverses + head * L, row, here, H * L, L, L)
        score = _tile(scores + head * L, row, here, H * L, L, L)
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        whole = tl.load(sums + (tl.minimum(start + L, stop) - 1) * H + head)
        b = tl.load(beta + row * H + head, mask=here, other=0.0)

        after = dstate.to(dtype)
        at = ((start + 2 * L - 1) // L - 1) * (H * V * C) + head * (V * C) + value[:, None] * C + column[None, :]
        tl.store(dstates + at, after, mask=in_state & (zero + index > 0))
        factor = tl.exp(since)
        dwritten = tl.dot(after, tl.trans(k_LC), input_precision=PRECISION) * tl.exp(whole - since)[None, :]
        dwritten = tl.dot(tl.trans(dout_LV), score, dwritten, input_precision=PRECISION)
        d = tl.dot(dwritten.to(dtype), inverse, input_precision=PRECISION)
        tl.store(dwanted + at_v, tl.trans(d), mask=in_v)
        read = (tl.trans(dout_LV).to(tl.float32) * (factor * scale)[None, :]).to(dtype)
        dstate = tl.dot(read, q_LC, dstate * tl.exp(whole), input_precision=PRECISION)
        dstate = tl.dot((-d * (factor * b)[None, :]).to(dtype), k_LC, dstate, input_precision=PRECISION)


@jit
def _gradients(
    dout, q, k, v, inverses, sums, beta, states, dwanted, dstates, dq, dk, dv, ddecay, dbeta,
    starts, ends, documents, cu_seqlens, scale, BV: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for a chunk and a key head.

    The gradient of a running sum follows from those of q, k and b k, whose rows have factors of its exponential.
    """
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + chunk).to(tl.int64), tl.load(ends + chunk).to(tl.int64)
    if start == end:
        return
    document = tl.load(documents + chunk)
    zero = tl.zeros((BV, 1), tl.int64)  # the interpreter has no masks of a single truth
    follows = zero + start > tl.load(cu_seqlens + document)
    continues = zero + end < tl.load(cu_seqlens + document + 1)
    step, column = tl.arange(0, L), tl.arange(0, CB)
    row, here = start + step, start + step < end
    dtype: tl.constexpr = q.dtype.element_ty
    k_LC = _tile(k + key_head * C, row, here, K * C, C, CB)
    q_LC = _tile(q + key_head * C, row, here, K * C, C, CB)
    dq_LC, dk_LC = tl.zeros((L, CB), tl.float32), tl.zeros((L, CB), tl.float32)
    before, after = (start + L - 1) // L - 1, (start + 2 * L - 1) // L - 1  # places of states
    for repeat in range(H // K):
        head = key_head * (H // K) + repeat
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        whole = tl.load(sums + (end - 1) * H + head)
        b = tl.load(beta + row * H + head, mask=here, other=0.0)
        factor = tl.exp(since)
        inverse = _tile(inverses + head * L, row, here, H * L, L, L)
        ds, da = tl.zeros((L, L), tl.float32), tl.zeros((L, L), tl.float32)
        from_q, from_k, to_k = (
            tl.zeros((L, CB), tl.float32), tl.zeros((L, CB), tl.float32), tl.zeros((L, CB), tl.float32)
        )  # fmt: skip
        db, of_states = tl.zeros((L,), tl.float32), 0.0
        for part in tl.static_range((V + BV - 1) // BV):
            value = part * BV + tl.arange(0, BV)
            in_state = (value < V)[:, None] & (column < C)[None, :]
            in_v = here[:, None] & (value < V)[None, :]
            at_v = (row * (H * V) + head * V)[:, None] + value[None, :]
            at_state = head * (V * C) + value[:, None] * C + column[None, :]
            state = tl.load(states + before * (H * V * C) + at_state, mask=in_state & follows, other=0.0)
            v_LV = tl.load(v + at_v, mask=in_v, other=0.0)
            read = tl.dot(k_LC, tl.trans(state), input_precision=PRECISION)
            wanted = ((v_LV.to(tl.float32) - read * factor[:, None]) * b[:, None]).to(dtype)
            written = tl.dot(inverse, wanted, input_precision=PRECISION).to(dtype)
            dout_LV = tl.load(dout + at_v, mask=in_v, other=0.0)
            dwanted_LV = tl.load(dwanted + at_v, mask=in_v, other=0.0)
            ds = tl.dot(dout_LV, tl.trans(written), ds, input_precision=PRECISION)
            da = tl.dot(dwanted_LV, tl.trans(written), da, input_precision=PRECISION)
            from_q = tl.dot(dout_LV, state, from_q, input_precision=PRECISION)
            from_k = tl.dot(dwanted_LV, state, from_k, input_precision=PRECISION)
            dstate = tl.load(dstates + after * (H * V * C) + at_state, mask=in_state & continues, other=0.0)
            to_k = tl.dot(written, dstate, to_k, input_precision=PRECISION)
            of_states += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            d = dwanted_LV.to(tl.float32)
            db += tl.sum(v_LV.to(tl.float32) * d, 1)
            tl.store(dv + at_v, d * b[:, None], mask=in_v)
        between = tl.where(step[:, None] >= step[None, :], since[:, None] - since[None, :], float("-inf"))
        factors = tl.exp(between)
        ds = (ds * factors * scale).to(dtype)
        da = tl.where(step[:, None] > step[None, :], -da * factors, 0.0)
        from_q = tl.dot(ds, k_LC, from_q * (factor * scale)[:, None], input_precision=PRECISION)
        from_k = tl.dot(da.to(dtype), k_LC, -from_k * factor[:, None], input_precision=PRECISION)
        keys, queries = k_LC.to(tl.float32), q_LC.to(tl.float32)
        to_k *= tl.exp(whole - since)[:, None]
        of_last = tl.sum(keys * to_k) + tl.exp(whole) * of_states
        to_k = tl.dot(tl.trans(ds), q_LC, to_k, input_precision=PRECISION)
        to_k = tl.dot(tl.trans((da * b[:, None]).to(dtype)), k_LC, to_k, input_precision=PRECISION)
        read_k = tl.sum(keys * from_k, 1)
        of_sums = tl.sum(queries * from_q, 1) + b * read_k - tl.sum(keys * to_k, 1)
        later = tl.sum(tl.where(step[None, :] >= step[:, None], of_sums[None, :], 0.0), 1)
        tl.store(ddecay + row * H + head, later + of_last, mask=here)
        tl.store(dbeta + row * H + head, db + read_k, mask=here)
        dq_LC += from_q
        dk_LC += from_k * b[:, None] + to_k
    at = (row * (K * C) + key_head * C)[:, None] + column[None, :]
    inside = here[:, None] & (column < C)[None, :]
    tl.store(dq + at, dq_LC, mask=inside)
    tl.store(dk + at, dk_LC, mask=inside)
