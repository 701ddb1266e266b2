"""Causal attention over isolated documents as Triton kernels: FlashAttention-2 with a deterministic backward.

A query i sees the keys from first(i) to i, and a key j is seen by the queries from j until limit(j), where documents
and the window set first and limit. Both grow with their argument, so a block's bounds are those of its first and last
token; they are read on the device, and the grid follows from the number of tokens alone. Of the blocks between them,
most need no mask.

For q, k and v as ScaledHeads the operands of all products are in float16, normalized row by row, and products are
summed in float16 (kernels/half.py). Along tokens rows have scales of their own, which the other operand takes over:
probabilities, whose scale follows from the largest of them, or gradients of scores, which are normalized row by row
again.

The backward has no atomics (it computes scores twice instead): one kernel for dq, where a block of queries goes over
its keys, and one for dk and dv, where a block of keys goes over its queries, head by head of its group. Each sum has
one order, so bits depend on the tiles alone, which kernels/flash_tiles.py gives.
"""

from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.flash_tiles import Passes, Tiles, tiles
from rptrain.kernels.half import Heads, ScaledHeads, inverse, normalized, scaled_heads, sum_of
from rptrain.kernels.launch import DTYPES, HAS_TRITON, jit, power_of_2, tl, triton
from rptrain.kernels.target import target_of

MAX_HEAD_SIZE = 512
UNLIMITED = 1 << 30  # a window that hides nothing


Scales = tuple[Tensor | None, ...]  # of the rows of q, k, v and, in backward, dout: ScaledHeads.scales; or None each
UNSCALED: Scales = (None,) * 4


def takes(dtype: torch.dtype, head_size: int) -> bool:
    """Whether the kernels take heads of this type and size, on a CUDA device."""
    return HAS_TRITON and dtype in DTYPES and head_size <= MAX_HEAD_SIZE


def forward_triton(
    q_THC: Heads,
    k_TKC: Heads,
    v_TKC: Heads,
    positions: Tensor,
    length: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    passes: Passes | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, H, C], and the scores' log-sum-exp [H, T], float32, sinks included.

    `scale`: the factor of the scores, by default C ** -0.5.
    A token attends to at most `window` keys, including itself. `sinks` [H] are one more score per head, which takes
    probability but has no value. `length` is that of a row; it orders the work and changes no result.
    """
    passes = passes or _passes(q_THC)
    (q, k, v), scales = _operands(q_THC, k_TKC, v_TKC, passes=passes)
    tokens, heads, size = q.shape
    tile = passes.forward
    out = torch.empty(q.shape, dtype=q_THC.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    blocks, period = _blocks(tokens, length, tile.queries)
    from_q, from_k, from_v = _by_block((q, tile.queries), (k, tile.keys), (v, tile.keys), tma=passes.tma)
    _forward[heads, blocks](
        from_q, from_k, from_v, *scales, sinks, positions, out, lse, tokens, window or UNLIMITED,
        scale or size**-0.5, period, **_constants(tile, passes.tma, q=q, k=k, v=v, out=out),
    )  # fmt: skip
    return out, lse


def backward_triton(
    dout: Tensor,
    q_THC: Heads,
    k_TKC: Heads,
    v_TKC: Heads,
    out: Tensor,
    lse: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    length: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    grad_sinks: Tensor | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    passes: Passes | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv: new, or `into`, whose tokens may have any stride but hold their heads side by side.

    `positions` [T] and `cu_seqlens` [documents + 1] (int32) say the same. The gradient of `sinks` is added to
    `grad_sinks` [H], float32.
    """
    passes = passes or _passes(q_THC)
    dq, dk, dv = into or (torch.empty(x.shape, dtype=x.dtype, device=dout.device) for x in (q_THC, k_TKC, v_TKC))
    factor = scaled_heads(_readable(dout, False)) if isinstance(q_THC, ScaledHeads) else dout
    (q, k, v, dout), scales = _operands(q_THC, k_TKC, v_TKC, factor, passes=passes)
    inputs, out = (q, k, v, dout, lse), _readable(out, passes.tma)
    layout = positions, cu_seqlens, length, window
    delta, limits = dq_triton(dq, *inputs, out, *layout, sinks, grad_sinks, passes, scales, scale=scale)
    dkdv_triton(dk, dv, *inputs, delta, limits, length, passes, scales, scale=scale)
    return dq, dk, dv


def dq_triton(
    dq: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    out: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    length: int,
    window: int | None,
    sinks: Tensor | None,
    grad_sinks: Tensor | None,
    passes: Passes,
    scales: Scales = UNSCALED,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes dq, adds to `grad_sinks`. Returns rowsum(dout * out) [H, T], float32, and limit [T], int32.

    `scales` are those of q, k, v and dout where these are the values of ScaledHeads.
    """
    tokens, heads, size = q.shape
    tile = passes.dq
    delta = torch.empty_like(lse)
    limits = torch.empty(tokens, dtype=torch.int32, device=q.device)
    blocks, period = _blocks(tokens, length, tile.queries)
    partials = None if sinks is None else torch.empty(blocks, heads, dtype=torch.float32, device=q.device)
    operands = [(q, tile.queries), (k, tile.keys), (v, tile.keys), (dout, tile.queries)]
    from_q, from_k, from_v, from_dout = _by_block(*operands, tma=passes.tma)
    documents = cu_seqlens.numel() - 1  # made odd: for 1 and multiples of 16 Triton would compile anew
    _backward_queries[heads, blocks](
        from_q, from_k, from_v, from_dout, *scales, out, sinks, lse, positions, cu_seqlens, dq, delta, limits, partials,
        tokens, 2 * documents + 1, window or UNLIMITED, scale or size**-0.5, period,
        **_constants(tile, passes.tma, q=q, k=k, v=v, dout=dout, out=out, dq=dq),
    )  # fmt: skip
    if partials is not None and grad_sinks is not None:
        sizes: dict[str, Any] = {"ROWS": 32, "BLOCK": power_of_2(heads)}
        _add_partials[1,](partials, grad_sinks, blocks, heads, **sizes)
    return delta, limits


def dkdv_triton(
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    limits: Tensor,
    length: int,
    passes: Passes,
    scales: Scales = UNSCALED,
    *,
    scale: float | None = None,
) -> None:
    """Writes dk and dv, from what `dq_triton` returned."""
    tokens, kv_heads, size = k.shape
    tile = passes.dkdv
    blocks, period = _blocks(tokens, length, tile.keys)
    operands = [(q, tile.queries), (k, tile.keys), (v, tile.keys), (dout, tile.queries)]
    from_q, from_k, from_v, from_dout = _by_block(*operands, tma=passes.tma)
    _backward_keys[kv_heads, blocks](
        from_q, from_k, from_v, from_dout, *scales, lse, delta, limits, dk, dv, tokens, scale or size**-0.5, period,
        **_constants(tile, passes.tma, q=q, k=k, v=v, dout=dout, dk=dk, dv=dv),
    )  # fmt: skip


def _operands(*heads: Heads, passes: Passes) -> tuple[list[Tensor], Scales]:
    """The tensors as the kernels read them, and the scales of their rows, if any."""
    values = [x.values if isinstance(x, ScaledHeads) else x for x in heads]
    scales = tuple(x.scales if isinstance(x, ScaledHeads) else None for x in heads)
    return [_readable(x, passes.tma) for x in values], scales


def _readable(x_THC: Tensor, tma: bool) -> Tensor:
    """The same values with the heads of a token side by side; for the accelerator, 16 bytes aligned."""
    _, heads, size = x_THC.shape
    stride, head_stride, last_stride = x_THC.stride()
    side_by_side = (last_stride == 1 or size == 1) and (head_stride == size or heads == 1)
    aligned = x_THC.data_ptr() % 16 == 0 and stride * x_THC.element_size() % 16 == 0
    if side_by_side and (aligned or not tma):
        return x_THC
    return x_THC.clone(memory_format=torch.contiguous_format)


def _by_block(*tensors: tuple[Tensor, int], tma: bool) -> list[Any]:
    """Operands for reading blocks of tokens: tensor descriptors [heads, tokens, size], or the tensors."""
    if not tma:
        return [x for x, _ in tensors]
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptors = []
    for x, rows in tensors:
        tokens, heads, size = x.shape
        block = [1, rows, max(16, power_of_2(size))]
        descriptors.append(TensorDescriptor(x, [heads, tokens, size], [size, x.stride(0), 1], block))
    return descriptors


def _blocks(tokens: int, length: int, block: int) -> tuple[int, int]:
    """Blocks of tokens, and how many of them a row has (all, if it has no whole number)."""
    blocks, rows = triton.cdiv(tokens, block), tokens // length
    return blocks, blocks if blocks % rows else blocks // rows


def _constants(tile: Tiles, tma: bool, *, q: Tensor, k: Tensor, **others: Tensor) -> dict[str, Any]:
    """The constants of a kernel, including the strides of all named tensors, and its launch options."""
    size = q.shape[-1]
    strides = {f"{name.upper()}_STRIDE": x.stride(0) for name, x in ({"q": q, "k": k} | others).items()}
    return strides | {
        "GROUP": q.shape[1] // k.shape[1],
        "C": size,
        "BLOCK_C": max(16, power_of_2(size)),
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "TMA": tma,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _passes(q: Heads) -> Passes:
    scaled = isinstance(q, ScaledHeads)
    device = q.values.device if scaled else q.device
    return tiles(q.dtype, q.shape[-1], target_of(device), half_sums=scaled)


@jit
def _forward(
    q, k, v, q_scales, k_scales, v_scales, sinks, positions, out, lse, tokens, window, scale, period,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: softmax over the keys as they come, in base 2."""
    head = tl.program_id(0)
    base_2_scale = _base_2(scale)
    HALF: tl.constexpr = q_scales is not None
    key_head = head // GROUP
    # The last blocks of all rows come first: they have the most keys.
    blocks, turn = tl.num_programs(1) // period, tl.program_id(1)
    begin = ((turn % blocks) * period + period - 1 - turn // blocks) * BLOCK_M
    m, column = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    first, low, clear, end = _keys_of(positions, begin, m, tokens, window, BLOCK_M)
    queries = _load(q, head, begin, tokens, Q_STRIDE, C, BLOCK_C, BLOCK_M, TMA)
    query_scales = _scales(q_scales, head, m, tokens, HALF)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    if sinks is None:
        # Finite, so that a row whose keys so far are all hidden stays free of NaN.
        top = tl.full([BLOCK_M], -3.0e38, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        top = tl.zeros([BLOCK_M], tl.float32) + _base_2(tl.load(sinks + head).to(tl.float32))
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    for n in range(low, end, BLOCK_N):
        keys = _load(k, key_head, n, tokens, K_STRIDE, C, BLOCK_C, BLOCK_N, TMA)
        scores = _product(queries, keys, query_scales, _scales(k_scales, key_head, n + column, tokens, HALF), HALF)
        if (n < clear) | (n + BLOCK_N > begin + 1):
            visible = ((n + column)[None, :] >= first[:, None]) & ((n + column)[None, :] <= m[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * base_2_scale)
        probs = tl.exp2(scores * base_2_scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(probs, 1)
        top = new_top
        values = _load(v, key_head, n, tokens, V_STRIDE, C, BLOCK_C, BLOCK_N, TMA)
        value_scales = _scales(v_scales, key_head, n + column, tokens, HALF)
        acc = _add_weighted(probs, values, acc * shrink[:, None], value_scales, HALF)
    _store(out, acc / total[:, None], head, begin, tokens, OUT_STRIDE, C)
    tl.store(lse + head.to(tl.int64) * tokens + m, (top + tl.log2(total)) * 0.6931471805599453, mask=m < tokens)


@jit
def _backward_queries(
    q, k, v, dout, q_scales, k_scales, v_scales, dout_scales, out, sinks, lse, positions, cu_seqlens, dq, delta,
    limits, dsinks,
    tokens, twice_documents, window, scale, period,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, DOUT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, DQ_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head; and what the next kernel needs: delta, and limits by head 0's programs."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    base_2_scale = _base_2(scale)
    HALF: tl.constexpr = q_scales is not None
    key_head = head // GROUP
    blocks, turn = tl.num_programs(1) // period, tl.program_id(1)
    begin = ((turn % blocks) * period + period - 1 - turn // blocks) * BLOCK_M
    m, column = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    here, row = m < tokens, head.to(tl.int64) * tokens
    if head == 0:
        tl.store(limits + m, _limit(cu_seqlens, m, twice_documents // 2, window), mask=here)
    do = _load(dout, head, begin, tokens, DOUT_STRIDE, C, BLOCK_C, BLOCK_M, TMA)
    o = _load_rows(out, head, begin, tokens, OUT_STRIDE, C, BLOCK_C, BLOCK_M)
    row_delta = tl.cast(tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), tl.float32)
    do_scales = _scales(dout_scales, head, m, tokens, HALF)
    if HALF:
        row_delta *= do_scales
    row_lse = _base_2(tl.load(lse + row + m, mask=here, other=0.0))
    tl.store(delta + row + m, row_delta, mask=here)
    if sinks is not None:
        share = tl.exp2(_base_2(tl.load(sinks + head).to(tl.float32)) - row_lse)
        dsink = tl.sum(tl.where(here, -share * row_delta, 0.0), 0)
        tl.store(dsinks + begin // BLOCK_M * heads + head, dsink)

    first, low, clear, end = _keys_of(positions, begin, m, tokens, window, BLOCK_M)
    queries = _load(q, head, begin, tokens, Q_STRIDE, C, BLOCK_C, BLOCK_M, TMA)
    query_scales = _scales(q_scales, head, m, tokens, HALF)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for n in range(low, end, BLOCK_N):
        keys = _load(k, key_head, n, tokens, K_STRIDE, C, BLOCK_C, BLOCK_N, TMA)
        values = _load(v, key_head, n, tokens, V_STRIDE, C, BLOCK_C, BLOCK_N, TMA)
        key_scales = _scales(k_scales, key_head, n + column, tokens, HALF)
        value_scales = _scales(v_scales, key_head, n + column, tokens, HALF)
        probs = tl.exp2(_product(queries, keys, query_scales, key_scales, HALF) * base_2_scale - row_lse[:, None])
        if (n < clear) | (n + BLOCK_N > begin + 1):
            visible = ((n + column)[None, :] >= first[:, None]) & ((n + column)[None, :] <= m[:, None])
            probs = tl.where(visible, probs, 0.0)
        dprobs = _product(do, values, do_scales, value_scales, HALF)
        dscores = probs * (dprobs - row_delta[:, None])
        acc = _add(dscores, keys, acc, key_scales, HALF)
    _store(dq, acc * scale, head, begin, tokens, DQ_STRIDE, C)


@jit
def _backward_keys(
    q, k, v, dout, q_scales, k_scales, v_scales, dout_scales, lse, delta, limits, dk, dv, tokens, scale, period,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, DOUT_STRIDE: tl.constexpr,
    DK_STRIDE: tl.constexpr, DV_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one key head, over all query heads of its group. Scores are keys by queries."""
    key_head = tl.program_id(0)
    base_2_scale = _base_2(scale)
    HALF: tl.constexpr = q_scales is not None
    # The first blocks of all rows come first: they have the most queries.
    blocks, turn = tl.num_programs(1) // period, tl.program_id(1)
    begin = ((turn % blocks) * period + turn // blocks) * BLOCK_N
    n, column = begin + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    last = tl.minimum(begin + BLOCK_N, tokens) - 1
    limit = tl.load(limits + n, mask=n < tokens, other=0)
    end = tl.load(limits + last)
    keys = _load(k, key_head, begin, tokens, K_STRIDE, C, BLOCK_C, BLOCK_N, TMA)
    values = _load(v, key_head, begin, tokens, V_STRIDE, C, BLOCK_C, BLOCK_N, TMA)
    key_scales = _scales(k_scales, key_head, n, tokens, HALF)
    value_scales = _scales(v_scales, key_head, n, tokens, HALF)
    k_acc = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    v_acc = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for g in range(0, GROUP):
        head = key_head * GROUP + g
        row = tl.cast(head, tl.int64) * tokens
        for m in range(begin, end, BLOCK_M):
            queries = _load(q, head, m, tokens, Q_STRIDE, C, BLOCK_C, BLOCK_M, TMA)
            do = _load(dout, head, m, tokens, DOUT_STRIDE, C, BLOCK_C, BLOCK_M, TMA)
            here = m + column < tokens
            row_lse = _base_2(tl.load(lse + row + m + column, mask=here, other=0.0))
            query_scales = _scales(q_scales, head, m + column, tokens, HALF)
            do_scales = _scales(dout_scales, head, m + column, tokens, HALF)
            probs = tl.exp2(_product(keys, queries, key_scales, query_scales, HALF) * base_2_scale - row_lse[None, :])
            visible = ((m + column)[None, :] >= n[:, None]) & ((m + column)[None, :] < limit[:, None])
            probs = tl.where(visible, probs, 0.0)
            v_acc = _add_weighted(probs, do, v_acc, do_scales, HALF)
            dprobs = _product(values, do, value_scales, do_scales, HALF)
            row_delta = tl.load(delta + row + m + column, mask=here, other=0.0)
            dscores = probs * (dprobs - row_delta[None, :])
            k_acc = _add(dscores, queries, k_acc, query_scales, HALF)
    _store(dk, k_acc * scale, key_head, begin, tokens, DK_STRIDE, C)
    _store(dv, v_acc, key_head, begin, tokens, DV_STRIDE, C)


@jit
def _scales(scales, head, rows, tokens, HALF: tl.constexpr):
    """The scales of a head's rows, 0 beyond the last token; 1, which nothing reads, if operands are not normalized."""
    if HALF:
        return tl.load(scales + tl.cast(head, tl.int64) * tokens + rows, mask=rows < tokens, other=0.0)
    else:
        return 1.0


@jit
def _product(a, b, a_scales, b_scales, HALF: tl.constexpr):
    """a times the transposed b."""
    if HALF:
        return sum_of(a, tl.trans(b)) * a_scales[:, None] * b_scales[None, :]
    else:
        return tl.dot(a, tl.trans(b), input_precision="ieee")


@jit
def _add_weighted(probs, x, acc, scales, HALF: tl.constexpr):
    """acc + probs x, where probs are at most 1. In float16 they are at most 128, and x is less than 2."""
    if HALF:
        largest = tl.max(scales, 0)
        weights = probs * (scales * inverse(largest) * 128.0)[None, :]
        return acc + sum_of(weights.to(tl.float16), x) * (largest * 0.0078125)
    else:
        return tl.dot(probs.to(x.dtype), x, acc, input_precision="ieee")


@jit
def _add(y, x, acc, scales, HALF: tl.constexpr):
    """acc + y x. In float16 rows of y, multiplied by the scales of x, are less than 128, and x is less than 2."""
    if HALF:
        half, powers = normalized(y * scales[None, :], 64.0, 1)
        return acc + sum_of(half, x) * powers[:, None]
    else:
        return tl.dot(y.to(x.dtype), x, acc, input_precision="ieee")


@jit
def _add_partials(partials, total, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the sum over the rows of `partials` [count, width] to `total` [width]."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, count, ROWS):
        mask = (begin + row < count)[:, None] & (column < width)[None, :]
        acc += tl.load(partials + (begin + row)[:, None] * width + column[None, :], mask=mask, other=0.0)
    before = tl.load(total + column, mask=column < width, other=0.0)
    tl.store(total + column, before + tl.sum(acc, 0), mask=column < width)


@jit
def _base_2(x):
    """A power of e as one of 2."""
    return x * 1.4426950408889634


@jit
def _keys_of(positions, begin, m, tokens, window, BLOCK_M: tl.constexpr):
    """For queries from `begin` on: the first key of each, the least and greatest of these, and the end of all."""
    position = tl.load(positions + m, mask=m < tokens, other=0).to(tl.int32)
    end = tl.minimum(begin + BLOCK_M, tokens)
    low = begin - tl.minimum(tl.load(positions + begin).to(tl.int32), window - 1)
    high = end - 1 - tl.minimum(tl.load(positions + end - 1).to(tl.int32), window - 1)
    return m - tl.minimum(position, window - 1), low, high, end


@jit
def _limit(cu_seqlens, n, documents, window):
    """Where the queries that see each key end: with its document (found by bisection), or with the window."""
    low = n * 0
    high = low + documents
    left = documents
    while left > 0:
        middle = (low + high) // 2
        later = tl.load(cu_seqlens + middle) > n
        high = tl.where(later, middle, high)
        low = tl.where(later, low, tl.minimum(middle + 1, high))
        left = left // 2
    return tl.minimum(tl.load(cu_seqlens + high), n + window)


@jit
def _load(
    x, head, row, tokens, STRIDE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_C] of a head, from the token `row` on; 0 beyond the last token and the head size."""
    if TMA:
        block = x.load([head, row, 0]).reshape([ROWS, BLOCK_C])
    else:
        block = _load_rows(x, head, row, tokens, STRIDE, C, BLOCK_C, ROWS)
    return block


@jit
def _load_rows(
    x, head, row, tokens, STRIDE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_C)
    place = x + tl.cast(row, tl.int64) * STRIDE + head * C + (rows[:, None] * STRIDE + column[None, :])
    mask = (row + rows < tokens)[:, None]
    if BLOCK_C != C:
        mask = mask & (column < C)[None, :]
    return tl.load(place, mask=mask, other=0.0)


@jit
def _store(x, values, head, row, tokens, STRIDE: tl.constexpr, C: tl.constexpr):
    rows, column = tl.arange(0, values.shape[0]), tl.arange(0, values.shape[1])
    place = x + tl.cast(row, tl.int64) * STRIDE + head * C + (rows[:, None] * STRIDE + column[None, :])
    tl.store(place, values.to(x.dtype.element_ty), mask=(row + rows < tokens)[:, None] & (column < C)[None, :])
