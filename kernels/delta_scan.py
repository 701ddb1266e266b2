"""The scan of the gated delta rule over chunks of tokens as Triton kernels.

In a chunk of L tokens, with d the running sum of its decays, S the state before it, and q, k, v, b (beta) of its
tokens, what they write to the state is the solution W of a triangular system (arXiv 2412.06464, 3.3):

    (I + A) W = M,  M_i = b_i (v_i - exp(d_i) S^T k_i),  A_ij = b_i k_i.k_j exp(d_i - d_j) for j < i
    o_i = C^-0.5 exp(d_i) S^T q_i + sum_j P_ij W_j,      P_ij = C^-0.5 q_i.k_j exp(d_i - d_j) for j <= i
    S  <- exp(d_L) S + sum_j exp(d_L - d_j) k_j W_j^T

`prepare` computes A and P of all chunks, `invert` (I + A)^-1, and `scan` goes over the chunks of a document.
`scan_backward` goes over them in reverse, with the gradient of the state, and leaves that of M, from which
kernels/delta_gradients.py computes the others.

Operands of products are in the type of q; sums and states are float32. The state is kept transposed, [V, C], so that
the products that depend on it have it, and what follows from it, in registers. The states before chunks are stored
where a multiple of L lies among the L tokens before the chunk: never more than T / L, as a document's first chunk has
none. No result depends on other documents, or on the place of a document among the tokens.
"""

from rptrain.kernels.launch import jit, tl


@jit
def tile(base, start, step, here, stride, column, columns):
    """Rows of a matrix, from row `start`, and some of its columns; zeros outside."""
    place = step[:, None] * stride + column[None, :]
    return tl.load(base + start * stride + place, mask=here[:, None] & (column < columns)[None, :], other=0.0)


@jit
def store_tile(base, x, start, step, here, stride, column, columns):
    place = step[:, None] * stride + column[None, :]
    tl.store(base + start * stride + place, x, mask=here[:, None] & (column < columns)[None, :])


@jit
def state_tile(base, place, value, column, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, inside):
    """Some values of a stored state [V, C] of a head, whose part of `base` it is; zeros unless `inside`."""
    mask = (value < V)[:, None] & (column < C)[None, :] & inside
    return tl.load(base + place * (H * V * C) + value[:, None] * C + column[None, :], mask=mask, other=0.0)


@jit
def prepare(
    q, k, decay, beta, starts, ends, interactions, scores, sums, scale, HAS_INTERACTIONS: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr, CB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + chunk).to(tl.int64), tl.load(ends + chunk).to(tl.int64)
    if start == end:
        return
    step, column = tl.arange(0, L), tl.arange(0, CB)
    row, here = start + step, start + step < end
    k_LC = tile(k + key_head * C, start, step, here, K * C, column, C)
    q_LC = tile(q + key_head * C, start, step, here, K * C, column, C)
    of_keys = tl.dot(k_LC, tl.trans(k_LC), input_precision=PRECISION)
    of_queries = tl.dot(q_LC, tl.trans(k_LC), input_precision=PRECISION) * scale
    for repeat in range(H // K):
        head = key_head * (H // K) + repeat
        since = tl.cumsum(tl.load(decay + row * H + head, mask=here, other=0.0), 0)
        tl.store(sums + row * H + head, since, mask=here)
        between = tl.where(step[:, None] >= step[None, :], since[:, None] - since[None, :], float("-inf"))
        factors = tl.exp(between)
        store_tile(scores + head * L, of_queries * factors, start, step, here, H * L, step, L)
        if HAS_INTERACTIONS:
            b = tl.load(beta + row * H + head, mask=here, other=0.0)
            a = tl.where(step[:, None] > step[None, :], b[:, None] * of_keys * factors, 0.0)
            store_tile(interactions + head * L, a, start, step, here, H * L, step, L)


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
def invert(interactions, inverses, starts, ends, H: tl.constexpr, L: tl.constexpr, B: tl.constexpr):
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
def scan(
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
    state = tl.zeros((BV, CB), tl.float32)
    if HAS_INITIAL:
        state += tl.load(initial + place, mask=in_state, other=0.0)
    for start in tl.range(begin, stop, L, num_stages=STAGES):
        row, here = start + step, start + step < stop
        k_LC = tile(k + key_head * C, start, step, here, K * C, column, C)
        q_LC = tile(q + key_head * C, start, step, here, K * C, column, C)
        v_LV = tile(v + head * V, start, step, here, H * V, value, V)
        inverse = tile(inverses + head * L, start, step, here, H * L, step, L)
        score = tile(scores + head * L, start, step, here, H * L, step, L)
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
        store_tile(out + head * V, tl.trans(o), start, step, here, H * V, value, V)
        decayed = (written * tl.exp(whole - since)[None, :]).to(dtype)
        state = tl.dot(decayed, k_LC, state * tl.exp(whole), input_precision=PRECISION)
    if HAS_LAST:
        tl.store(last + place, state, mask=in_state)


@jit
def scan_backward(
    dout, q, k, inverses, scores, sums, beta, dwanted, dstates, cu_seqlens, scale,
    BV: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `scan`, from a document's last chunk to its first; writes the gradients of M and of states behind chunks."""
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
        k_LC = tile(k + key_head * C, start, step, here, K * C, column, C)
        q_LC = tile(q + key_head * C, start, step, here, K * C, column, C)
        dout_LV = tile(dout + head * V, start, step, here, H * V, value, V)
        inverse = tile(inverses + head * L, start, step, here, H * L, step, L)
        score = tile(scores + head * L, start, step, here, H * L, step, L)
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
        store_tile(dwanted + head * V, tl.trans(d), start, step, here, H * V, value, V)
        read = (tl.trans(dout_LV).to(tl.float32) * (factor * scale)[None, :]).to(dtype)
        dstate = tl.dot(read, q_LC, dstate * tl.exp(whole), input_precision=PRECISION)
        dstate = tl.dot((-d * (factor * b)[None, :]).to(dtype), k_LC, dstate, input_precision=PRECISION)
