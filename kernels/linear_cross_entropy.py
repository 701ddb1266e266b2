"""Output projection and cross-entropy over chunks of tokens, so that logits are never stored whole.

The logits of a chunk are rounded to the model's dtype, as Hugging Face's models do; the softmax is in float32 (float64
for float64) and their gradient takes their place. With `half_sums` the three products of fused 16-bit matrices are
summed in float16 (kernels/half.py). Nothing here waits for the device. Suffixes are those of
models/layer.py; W columns of the buffer of logits, V of which are used.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import half
from rptrain.kernels.batch import IGNORED
from rptrain.kernels.launch import fused, jit, power_of_2, programs, tl
from rptrain.kernels.linear import accumulate_weight_grad
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.reference.dense import wide
from rptrain.kernels.target import Target, target_of

CHUNK_BYTES = 5 * 2**28  # of logits
CHUNK_TOKENS = 4096  # the weight's gradient [V, D] is read and written once a chunk: 3 % more time with half as many
PIECE_BYTES = 2**23  # of logits at a time, where the reference runs
ALIGNMENT = 64  # columns: rows start on 128 bytes or more, for any vocabulary


def chunk_tokens(vocab: int, itemsize: int) -> int:
    """Tokens whose logits are computed at a time: a multiple of 128 if possible."""
    tokens = min(max(CHUNK_BYTES // (itemsize * _width(vocab)), 1), CHUNK_TOKENS)
    return tokens // 128 * 128 or tokens


def loss_workspace_bytes(tokens: int, vocab: int, itemsize: int, *, fused: bool = False) -> int:
    """Bytes that the loss and the gradients of `tokens` need at once, without the gradients themselves.

    These are a chunk's logits, the statistics, and the losses in float64; without the `fused` kernel,
    also a piece: the upcast logits, or the copy that torch's deterministic scatter makes of logits that need none.
    """
    wide_size = max(itemsize, 4)
    logits = min(chunk_tokens(vocab, itemsize), tokens) * _width(vocab) * itemsize
    piece = 0 if fused else min(_piece_tokens(vocab, wide_size), tokens) * vocab * wide_size
    return logits + piece + tokens * (2 * wide_size + 8)


def linear_cross_entropy(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, *, half_sums: bool = False) -> Tensor:
    """The sum over labels other than -100 of the cross-entropy: a scalar in the wide type."""
    statistics = _statistics(h_TD)
    for _ in _chunks(h_TD, w_VD, labels_T, None, statistics, _takes_half_sums(h_TD, w_VD, half_sums)):
        pass
    return _total(statistics)


def linear_cross_entropy_backward(
    h_TD: Tensor,
    w_VD: Tensor,
    labels_T: Tensor,
    scale: float,
    grad_w_VD: Tensor | None,
    *,
    half_sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """The unscaled loss sum, and the gradient [T, D] of `scale` times it; adds the weight's to its own, if any."""
    statistics = _statistics(h_TD)
    dh_TD = torch.empty_like(h_TD)
    half_sums = _takes_half_sums(h_TD, w_VD, half_sums)
    for span, dlogits in _chunks(h_TD, w_VD, labels_T, scale, statistics, half_sums):
        _product(dlogits, w_VD.t(), dh_TD[span], half_sums)
        if not half_sums:
            accumulate_weight_grad(grad_w_VD, dlogits, h_TD[span])
        elif grad_w_VD is not None:
            half.product(grad_w_VD, dlogits.t(), h_TD[span].t(), add=True)
    return _total(statistics), dh_TD


def _takes_half_sums(h_TD: Tensor, w_VD: Tensor, half_sums: bool) -> bool:
    return half_sums and fused(h_TD, w_VD) and half.takes(h_TD)


def _product(a: Tensor, b: Tensor, out: Tensor, half_sums: bool) -> None:
    """out = A B^T."""
    if half_sums:
        half.product(out, a, b)
    else:
        torch.mm(a, b.t(), out=out)


def _chunks(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: float | None, statistics: Tensor, half_sums: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Spans of tokens and, given `scale`, the gradient of their logits in a buffer that the next chunk uses again."""
    tokens, vocab = h_TD.shape[0], w_VD.shape[0]
    chunk = chunk_tokens(vocab, h_TD.itemsize)
    buffer_TW = h_TD.new_empty(min(chunk, tokens), _width(vocab))
    cross_entropy = cross_entropy_triton if fused(h_TD, w_VD) else _cross_entropy_pieces
    for begin in range(0, tokens, chunk):
        span = slice(begin, min(begin + chunk, tokens))
        logits_TW = buffer_TW[: span.stop - begin]
        _product(h_TD[span], w_VD, logits_TW[:, :vocab], half_sums)
        cross_entropy(logits_TW, vocab, labels_T[span], scale, *statistics[:, span])
        if not logits_TW.is_cuda:
            logits_TW[:, vocab:] = 0  # oneDNN's products with AMX read these columns, and NaN times 0 is NaN
        yield span, logits_TW[:, :vocab]


def _cross_entropy_pieces(
    logits_TW: Tensor, vocab: int, labels_T: Tensor, scale: float | None, losses_T: Tensor, lse_T: Tensor
) -> None:
    """The reference on few rows at a time, as it upcasts them; the contract of `cross_entropy_triton`."""
    rows = _piece_tokens(vocab, losses_T.itemsize)
    pieces = (x.split(rows) for x in (logits_TW[:, :vocab], labels_T, losses_T, lse_T))
    for logits, labels, losses, lse in zip(*pieces, strict=True):
        piece_losses, piece_lse = reference.cross_entropy_(logits, labels, scale)
        losses.copy_(piece_losses)
        lse.copy_(piece_lse)


def cross_entropy_triton(
    logits_TW: Tensor, vocab: int, labels_T: Tensor, scale: float | None, losses_T: Tensor, lse_T: Tensor
) -> None:
    """Loss and log-sum-exp of each row's first `vocab` columns (0 where ignored), in float32.

    Given `scale`, the gradient of `scale` times the loss replaces the logits. W is a multiple of ALIGNMENT; what the
    columns from `vocab` on hold does not matter, and they are overwritten with the rest.
    """
    tokens, width = logits_TW.shape
    assert logits_TW.is_contiguous() and width == _width(vocab)
    assert labels_T.is_contiguous() and losses_T.is_contiguous() and lse_T.is_contiguous()
    cut = sizes(vocab, logits_TW.itemsize, scale is not None, target_of(logits_TW.device))
    count = min(tokens, programs(logits_TW.device, cut.programs)) if cut.programs else tokens
    factor = 0.0 if scale is None else scale
    options = constants(vocab, logits_TW.itemsize, scale is not None, cut)
    _cross_entropy_kernel[(count,)](logits_TW, labels_T, losses_T, lse_T, factor, tokens, **options)


class Sizes(NamedTuple):
    """How a row is cut into tiles, of which each thread holds 16 bytes: blocks * group + kept of them."""

    warps: int
    blocks: int  # of `group` tiles: they are read twice, one block ahead of the work
    group: int
    kept: int  # the last tiles of the row: they stay in registers from one pass to the other
    programs: int  # on a multiprocessor, which take rows in turn; 0: one for each row


def sizes(vocab: int, itemsize: int, gradient: bool, target: Target) -> Sizes:
    """For the gradient of 16-bit logits 16 warps on a multiprocessor, with 128 registers a thread; else 32 with 64."""
    row = _width(vocab) * itemsize
    if not gradient:  # nothing is read again
        return cut(row, resident=32, keep=6, group=2)
    if itemsize == 4:  # there are no pairs to unpack: 4 tiles and the next 4 are too many
        return cut(row, resident=32, keep=0, group=2)
    return cut(row, resident=16, keep=8, group=6 if target.tight_registers else 8)  # else 8 would spill


def cut(row: int, *, resident: int, keep: int, group: int) -> Sizes:
    """Sizes for rows of so many bytes: at most `keep` kept tiles, but for the rest of the last block.

    Tiles are added in pairs: the loss has the same bits for any even `keep` and `group`.
    """
    warps = min(16, power_of_2(row // 2**12))
    tiles = -(-row // (512 * warps))
    blocks = min(max(-(-(tiles - keep) // group), 0), (tiles - 1) // group)  # the last tile is always kept
    kept = tiles - blocks * group
    return Sizes(warps, blocks, group, kept, resident // warps) if blocks else Sizes(warps, 0, 0, kept, 0)


def constants(vocab: int, itemsize: int, gradient: bool, cut: Sizes) -> dict[str, Any]:
    """The constants of the kernel."""
    return {
        "VOCAB": vocab,
        "WIDTH": _width(vocab),
        "GRADIENT": gradient,
        "IGNORED": IGNORED,
        "LANES": 32 * cut.warps,
        "SPAN": 16 // itemsize,
        "BLOCKS": cut.blocks,
        "GROUP": cut.group,
        "KEPT": cut.kept - 1,
        "num_warps": cut.warps,
    }


@jit
def _cross_entropy_kernel(
    logits,
    labels,
    losses,
    lse,
    scale,
    tokens,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    IGNORED: tl.constexpr,
    LANES: tl.constexpr,  # threads
    SPAN: tl.constexpr,  # neighboring columns in one thread, 16 bytes
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    KEPT: tl.constexpr,  # whole tiles; one more, the last of the row, may reach beyond it
):
    """Every programs-th row, in two passes; the next row's first block is read while this row's last is written.

    Pairs of 16-bit values are read as words of 32 bits: kept one by one they would take twice the registers.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    EACH: tl.constexpr = SPAN // 4  # columns in a word
    ROW: tl.constexpr = WIDTH // EACH  # words, as are the next two
    TILE: tl.constexpr = LANES * 4
    BLOCK: tl.constexpr = GROUP * TILE
    WHOLE: tl.constexpr = BLOCKS * GROUP + KEPT  # tiles
    # What is read again is to stay in the caches; nothing else is to push it out.
    AGAIN: tl.constexpr = "evict_last" if GRADIENT else "evict_first"
    ONCE: tl.constexpr = "evict_first"
    lanes = tl.arange(0, LANES)[:, None]
    columns = lanes * SPAN + tl.arange(0, SPAN)[None, :]
    last_columns = WHOLE * TILE * EACH + columns
    words = lanes * 4 + tl.arange(0, 4)[None, :]
    last_words = WHOLE * TILE + words
    program, count = tl.program_id(0), tl.num_programs(0)
    label = tl.load(labels + program).to(tl.int32)
    pairs = logits.to(tl.pointer_type(tl.int32)) + program.to(tl.int64) * ROW
    x = _tiles(pairs + words, GROUP, TILE, AGAIN)
    for step in range(tl.cdiv(tokens - program, count)):
        token = program + step * count
        row = logits + token.to(tl.int64) * WIDTH
        pairs = row.to(tl.pointer_type(tl.int32))
        to_next = tl.where(token + count < tokens, count, 0)
        next_label = tl.load(labels + token + to_next).to(tl.int32)
        if label == IGNORED:
            if BLOCKS > 0:
                x = _tiles(pairs + to_next.to(tl.int64) * ROW + words, GROUP, TILE, AGAIN)
            tl.store(losses + token, 0.0)
            tl.store(lse + token, 0.0)
            if GRADIENT:
                zeros = tl.zeros([LANES, SPAN], dtype)
                for i in range(WHOLE):
                    tl.store(row + i * TILE * EACH + columns, zeros, eviction_policy=ONCE)
                tl.store(row + last_columns, zeros, mask=last_columns < WIDTH, eviction_policy=ONCE)
        else:
            target = tl.load(row + label).to(tl.float32)  # the reductions below keep it before the stores
            # Each thread has a maximum and a sum of its own, so that warps do not wait for one another in the loop. The
            # lowest number instead of -inf: the difference of two of them is 0.
            tops = tl.full([LANES], -3.4028234663852886e38, tl.float32)
            sums = tl.zeros([LANES], tl.float32)
            for i in range(1, BLOCKS):
                ahead = _tiles(pairs + i * BLOCK + words, GROUP, TILE, AGAIN)
                tops, sums = _add_tiles(x, tops, sums, dtype)
                x = ahead
            kept = _tiles(pairs + BLOCKS * BLOCK + words, KEPT, TILE, ONCE)
            last = tl.load(pairs + last_words, mask=last_words < ROW, other=0, eviction_policy=ONCE)
            tops, sums = _add_tiles(x, tops, sums, dtype)
            tops, sums = _add_tiles(kept, tops, sums, dtype)
            values = _values(last, dtype)
            inside = ()
            for i in tl.static_range(EACH):
                inside += (tl.where(last_words * EACH + i < VOCAB, values[i], float("-inf")),)
            tops, sums = _add(inside, tops, sums)
            if BLOCKS > 0:
                if GRADIENT:  # backwards: what was read last is the likeliest to be still in the caches
                    x = _tiles(pairs + (BLOCKS - 1) * BLOCK + words, GROUP, TILE, ONCE)
                else:
                    x = _tiles(pairs + to_next.to(tl.int64) * ROW + words, GROUP, TILE, AGAIN)
            top = tl.max(tops, 0)
            total = tl.sum(sums * _exp(tops - top), 0)
            log_total = tl.log(total)
            tl.store(losses + token, log_total + (top - target))
            tl.store(lse + token, log_total + top)
            if GRADIENT:
                factor = scale / total
                # It is 0, but the compiler cannot know: it would keep the upcast values, for which there is no room
                nothing = tl.minimum(total.to(tl.int32, bitcast=True), 0)
                for i in tl.static_range(KEPT):
                    place = row + (BLOCKS * GROUP + i) * TILE * EACH + columns
                    tl.store(place, _gradient(kept[i] ^ nothing, top, factor, dtype), eviction_policy=ONCE)
                gradient = _gradient(last ^ nothing, top, factor, dtype)
                tl.store(row + last_columns, gradient, mask=last_columns < WIDTH, eviction_policy=ONCE)
                for i in range(BLOCKS - 1, 0, -1):
                    ahead = _tiles(pairs + (i - 1) * BLOCK + words, GROUP, TILE, ONCE)
                    for j in tl.static_range(GROUP):
                        place = row + (i * GROUP + j) * TILE * EACH + columns
                        tl.store(place, _gradient(x[j], top, factor, dtype), eviction_policy=ONCE)
                    x = ahead
                if BLOCKS > 0:
                    ahead = _tiles(pairs + to_next.to(tl.int64) * ROW + words, GROUP, TILE, AGAIN)
                    for j in tl.static_range(GROUP):
                        place = row + j * TILE * EACH + columns
                        tl.store(place, _gradient(x[j], top, factor, dtype), eviction_policy=ONCE)
                    x = ahead
                tl.debug_barrier()  # what another thread wrote at the target is overwritten
                tl.store(row + label, (_exp(target - top) * factor - scale).to(dtype))
        label = next_label


@jit
def _tiles(place, COUNT: tl.constexpr, STRIDE: tl.constexpr, POLICY: tl.constexpr):
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles += (tl.load(place + i * STRIDE, eviction_policy=POLICY),)
    return tiles


@jit
def _add_tiles(tiles, tops, sums, dtype: tl.constexpr):
    """Two tiles at a time, whose upcast values fit in registers beside those kept."""
    for i in tl.static_range(0, len(tiles), 2):
        values = _values(tiles[i], dtype)
        if i + 1 < len(tiles):
            values += _values(tiles[i + 1], dtype)
        tops, sums = _add(values, tops, sums)
    return tops, sums


@jit
def _add(values, tops, sums):
    """The maximum of each thread, and the sum of its exponentials relative to that."""
    new_tops = tops
    for i in tl.static_range(len(values)):
        new_tops = tl.maximum(new_tops, tl.max(values[i], 1))
    sums *= _exp(tops - new_tops)
    for i in tl.static_range(len(values)):
        sums += tl.sum(_exp(values[i] - new_tops[:, None]), 1)
    return new_tops, sums


@jit
def _values(words, dtype: tl.constexpr):
    """The content of the words in float32: values, or values of even and of odd columns."""
    if dtype == tl.float32:
        return (words.to(tl.float32, bitcast=True),)
    elif dtype == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        even = words.to(tl.int16).to(tl.float16, bitcast=True)
        odd = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return even.to(tl.float32), odd.to(tl.float32)


@jit
def _gradient(words, top, factor, dtype: tl.constexpr):
    """Probabilities times the scale, [LANES, SPAN], without what is taken off at the target."""
    values = _values(words, dtype)
    gradient = _exp(values[0] - top) * factor
    if dtype != tl.float32:
        pairs = tl.join(gradient, _exp(values[1] - top) * factor)
        gradient = pairs.reshape(words.shape[0], 2 * words.shape[1])
    return gradient.to(dtype)


@jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)  # half the instructions of tl.exp, which minds denormal results


def _width(vocab: int) -> int:
    return -(-vocab // ALIGNMENT) * ALIGNMENT


def _piece_tokens(vocab: int, wide_size: int) -> int:
    return max(PIECE_BYTES // (vocab * wide_size), 1)


def _statistics(h_TD: Tensor) -> Tensor:
    """Losses and log-sum-exps [2, T]."""
    return torch.empty(2, h_TD.shape[0], dtype=wide(h_TD.dtype), device=h_TD.device)


def _total(statistics: Tensor) -> Tensor:
    """The losses added in float64, in the order that torch has for their number."""
    losses_T = statistics[0]
    return losses_T.sum(dtype=torch.float64).to(losses_T.dtype)
