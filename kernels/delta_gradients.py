"""The gradients of the gated delta rule in each chunk, as Triton kernels, after the scan in reverse (delta_scan.py).

`pair_gradients` computes W again and the gradients of P, A and values; `query_gradients` and `key_gradients` those of
queries and keys, and `decay_gradients` those of decays.
"""

from rptrain.kernels.delta_scan import state_tile, store_tile, tile
from rptrain.kernels.launch import jit, tl


@jit
def pair_gradients(
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
    k_LC = tile(k + head // (H // K) * C, start, step, here, K * C, column, C)
    inverse = tile(inverses + head * L, start, step, here, H * L, step, L)
    since = tl.load(sums + row * H + head, mask=here, other=0.0)
    b = tl.load(beta + row * H + head, mask=here, other=0.0)
    factor = tl.exp(since)
    ds, da = tl.zeros((L, L), tl.float32), tl.zeros((L, L), tl.float32)
    db = tl.zeros((L,), tl.float32)
    before = (start + L - 1) // L - 1  # the place of the state
    for part in range((V + BV - 1) // BV):
        value = part * BV + tl.arange(0, BV)
        state = state_tile(states + head * (V * C), before, value, column, H, C, V, follows)
        v_LV = tile(v + head * V, start, step, here, H * V, value, V).to(tl.float32)
        dwanted_LV = tile(dwanted + head * V, start, step, here, H * V, value, V)
        d = dwanted_LV.to(tl.float32)
        db += tl.sum(v_LV * d, 1)
        store_tile(dv + head * V, d * b[:, None], start, step, here, H * V, value, V)
        read = tl.dot(k_LC, tl.trans(state), input_precision=PRECISION)
        wanted = ((v_LV - read * factor[:, None]) * b[:, None]).to(dtype)
        w = tl.dot(inverse, wanted, input_precision=PRECISION).to(dtype)
        store_tile(written + head * V, w, start, step, here, H * V, value, V)
        dout_LV = tile(dout + head * V, start, step, here, H * V, value, V)
        ds = tl.dot(dout_LV, tl.trans(w), ds, input_precision=PRECISION)
        da = tl.dot(dwanted_LV, tl.trans(w), da, input_precision=PRECISION)
    between = tl.where(step[:, None] >= step[None, :], since[:, None] - since[None, :], float("-inf"))
    factors = tl.exp(between)
    store_tile(dscores + head * L, ds * factors * scale, start, step, here, H * L, step, L)
    da = tl.where(step[:, None] > step[None, :], -da * factors, 0.0)
    store_tile(dinteractions + head * L, da, start, step, here, H * L, step, L)
    tl.store(dbeta + row * H + head, db, mask=here)


@jit
def query_gradients(
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
    k_LC = tile(k + key_head * C, start, step, here, K * C, column, C)
    q_LC = tile(q + key_head * C, start, step, here, K * C, column, C).to(tl.float32)
    dq_LC = tl.zeros((L, BC), tl.float32)
    before = (start + L - 1) // L - 1  # the place of the state
    of_sums = dsums + block * tokens * H + row * H + key_head * (H // K)
    for repeat in range(H // K):
        head = key_head * (H // K) + repeat
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        ds = tile(dscores + head * L, start, step, here, H * L, step, L)
        grad = tl.zeros((L, BC), tl.float32)
        for part in range((V + BV - 1) // BV):
            value = part * BV + tl.arange(0, BV)
            dout_LV = tile(dout + head * V, start, step, here, H * V, value, V)
            state = state_tile(states + head * (V * C), before, value, column, H, C, V, follows)
            grad = tl.dot(dout_LV, state, grad, input_precision=PRECISION)
        grad = tl.dot(ds, k_LC, grad * (tl.exp(since) * scale)[:, None], input_precision=PRECISION)
        tl.store(of_sums + repeat, tl.sum(q_LC * grad, 1), mask=here)
        dq_LC += grad
    store_tile(dq + key_head * C, dq_LC, start, step, here, K * C, column, C)


@jit
def key_gradients(
    q, k, sums, beta, states, dwanted, dstates, written, dscores, dinteractions, dk, dsums, dbetas,
    starts, ends, documents, cu_seqlens, tokens, BV: tl.constexpr, BC: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `query_gradients`, of keys; and what they add to the gradient of beta.

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
    k_LC = tile(k + key_head * C, start, step, here, K * C, column, C)
    q_LC = tile(q + key_head * C, start, step, here, K * C, column, C)
    dk_LC = tl.zeros((L, BC), tl.float32)
    before, after = (start + L - 1) // L - 1, (start + 2 * L - 1) // L - 1  # places of states
    for repeat in range(H // K):
        head = key_head * (H // K) + repeat
        since = tl.load(sums + row * H + head, mask=here, other=0.0)
        whole = tl.load(sums + (end - 1) * H + head)
        b = tl.load(beta + row * H + head, mask=here, other=0.0)
        da = tile(dinteractions + head * L, start, step, here, H * L, step, L)
        grad = tl.zeros((L, BC), tl.float32)  # of b k, which reads the state
        for part in range((V + BV - 1) // BV):
            value = part * BV + tl.arange(0, BV)
            dwanted_LV = tile(dwanted + head * V, start, step, here, H * V, value, V)
            state = state_tile(states + head * (V * C), before, value, column, H, C, V, zero + start > begin)
            grad = tl.dot(dwanted_LV, state, grad, input_precision=PRECISION)
        grad = tl.dot(da, k_LC, -grad * tl.exp(since)[:, None], input_precision=PRECISION)
        of_beta = tl.sum(k_LC.to(tl.float32) * grad, 1)
        dk_LC += grad * b[:, None]

        of_states = 0.0
        for part in range((V + 15) // 16):
            value = part * 16 + tl.arange(0, 16)
            inside = (few + start > begin) & (few + end < stop)
            state = state_tile(states + head * (V * C), before, value, column, H, C, V, inside)
            dstate = state_tile(dstates + head * (V * C), after, value, column, H, C, V, inside)
            of_states += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        grad = tl.zeros((L, BC), tl.float32)  # of k, which is written to the state
        for part in range((V + BV - 1) // BV):
            value = part * BV + tl.arange(0, BV)
            w = tile(written + head * V, start, step, here, H * V, value, V)
            dstate = state_tile(dstates + head * (V * C), after, value, column, H, C, V, zero + end < stop)
            grad = tl.dot(w, dstate, grad, input_precision=PRECISION)
        grad *= tl.exp(whole - since)[:, None]
        of_last = tl.sum(k_LC.to(tl.float32) * grad) + tl.exp(whole) * of_states
        ds = tile(dscores + head * L, start, step, here, H * L, step, L)
        grad = tl.dot(tl.trans(ds), q_LC, grad, input_precision=PRECISION)
        by_beta = (da.to(tl.float32) * b[:, None]).to(dtype)
        grad = tl.dot(tl.trans(by_beta), k_LC, grad, input_precision=PRECISION)
        dk_LC += grad
        place = block * tokens * H + row * H + head
        of_sums = tl.load(dsums + place, mask=here, other=0.0) + b * of_beta - tl.sum(k_LC.to(tl.float32) * grad, 1)
        tl.store(dsums + place, of_sums + tl.where(row == end - 1, of_last, 0.0), mask=here)
        tl.store(dbetas + place, of_beta, mask=here)
    store_tile(dk + key_head * C, dk_LC, start, step, here, K * C, column, C)


@jit
def decay_gradients(
    dsums, dbetas, ddecay, dbeta, starts, ends, tokens, PARTS: tl.constexpr, H: tl.constexpr, L: tl.constexpr,
    HB: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's decays from those of their running sums; adds the parts of beta's."""
    start, end = tl.load(starts + tl.program_id(0)).to(tl.int64), tl.load(ends + tl.program_id(0)).to(tl.int64)
    step, head = tl.arange(0, L), tl.program_id(1) * HB + tl.arange(0, HB)
    here = start + step < end
    sums = tl.zeros((L, HB), tl.float32)
    betas = tile(dbeta, start, step, here, H, head, H)
    for part in range(PARTS):
        sums += tile(dsums + part * tokens * H, start, step, here, H, head, H)
        betas += tile(dbetas + part * tokens * H, start, step, here, H, head, H)
    later = tl.sum(sums, 0)[None, :] - tl.cumsum(sums, 0) + sums
    store_tile(ddecay, later, start, step, here, H, head, H)
    store_tile(dbeta, betas, start, step, here, H, head, H)
