"""Output projection and cross-entropy over chunks of tokens, so that logits are never stored whole.

The logits of a chunk are rounded to the model's dtype, as Hugging Face's models do; the softmax is in float32 (float64
for float64) and their gradient takes their place. Nothing here waits for the device. Suffixes are those of
models/spec.py; W columns of the buffer of logits, V of which are used.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels import reference
from rptrain.kernels.launch import fused, power_of_2, tl, triton
from rptrain.kernels.linear import accumulate_weight_grad
from rptrain.kernels.reference import IGNORED, wide

CHUNK_BYTES = 5 * 2**27  # of logits
CHUNK_TOKENS = 2048  # the weight's gradient [V, D] is read and written once a chunk: more tokens hardly save anything
PIECE_BYTES = 2**23  # of widened logits at a time, where the oracle runs
ALIGNMENT = 64  # columns: rows start on 128 bytes or more, for any vocabulary


def chunk_tokens(vocab: int, itemsize: int) -> int:
    """Tokens whose logits are computed at a time: a multiple of 128 where there is room for that many."""
    tokens = min(max(CHUNK_BYTES // (itemsize * _width(vocab)), 1), CHUNK_TOKENS)
    return tokens // 128 * 128 or tokens


def loss_workspace_bytes(tokens: int, vocab: int, itemsize: int) -> int:
    """What the loss and the gradients of `tokens` take at once, without the gradients themselves."""
    wide_size = max(itemsize, 4)
    logits = min(chunk_tokens(vocab, itemsize), tokens) * _width(vocab) * itemsize
    widened = 0 if itemsize == wide_size else min(_piece_tokens(vocab, wide_size), tokens) * vocab * wide_size
    return logits + widened + 2 * tokens * wide_size


def linear_cross_entropy(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> Tensor:
    """The sum over labels other than -100 of the cross-entropy: a scalar in the wide type."""
    statistics = _statistics(h_TD)
    for _ in _chunks(h_TD, w_VD, labels_T, None, statistics):
        pass
    return _total(statistics)


def linear_cross_entropy_backward(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: float, grad_w_VD: Tensor
) -> tuple[Tensor, Tensor]:
    """The unscaled loss sum, and the gradient [T, D] of `scale` times it; adds the weight's to its own."""
    statistics = _statistics(h_TD)
    dh_TD = torch.empty_like(h_TD)
    for span, dlogits in _chunks(h_TD, w_VD, labels_T, scale, statistics):
        torch.mm(dlogits, w_VD, out=dh_TD[span])
        accumulate_weight_grad(grad_w_VD, dlogits, h_TD[span])
    return _total(statistics), dh_TD


class LinearCrossEntropy(torch.autograd.Function):
    """For autograd: h [T, D], w [V, D], labels [T] to the loss sum, and the count of supervised tokens (int64 scalar).

    Backward computes the logits again and multiplies by the incoming gradient at the end, after rounding.
    """

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(h_TD, w_VD, labels_T)
        count = (labels_T != IGNORED).sum()
        ctx.mark_non_differentiable(count)
        return linear_cross_entropy(h_TD, w_VD, labels_T), count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        dloss, _ = grad_outputs  # of the count: nothing
        h_TD, w_VD, labels_T = ctx.saved_tensors
        grad_w_VD = torch.zeros_like(w_VD, dtype=wide(w_VD.dtype))
        _, dh_TD = linear_cross_entropy_backward(h_TD, w_VD, labels_T, 1.0, grad_w_VD)
        return dh_TD.mul_(dloss), grad_w_VD.mul_(dloss).to(w_VD.dtype), None


def _chunks(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: float | None, statistics: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Spans of tokens and, given `scale`, the gradient of their logits in a buffer that the next chunk uses again."""
    tokens, vocab = h_TD.shape[0], w_VD.shape[0]
    chunk = chunk_tokens(vocab, h_TD.itemsize)
    buffer_TW = h_TD.new_empty(min(chunk, tokens), _width(vocab))
    cross_entropy = cross_entropy_triton if fused(h_TD, w_VD) else _cross_entropy_pieces
    for begin in range(0, tokens, chunk):
        span = slice(begin, min(begin + chunk, tokens))
        logits_TW = buffer_TW[: span.stop - begin]
        torch.mm(h_TD[span], w_VD.t(), out=logits_TW[:, :vocab])
        cross_entropy(logits_TW, vocab, labels_T[span], scale, *statistics[:, span])
        yield span, logits_TW[:, :vocab]


def _cross_entropy_pieces(
    logits_TW: Tensor, vocab: int, labels_T: Tensor, scale: float | None, losses_T: Tensor, lse_T: Tensor
) -> None:
    """The oracle on few rows at a time, as it widens them; the contract of `cross_entropy_triton`."""
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
    assert logits_TW.is_contiguous() and width % ALIGNMENT == 0 and vocab <= width
    assert labels_T.is_contiguous() and losses_T.is_contiguous() and lse_T.is_contiguous()
    block, warps = sizes(vocab, logits_TW.itemsize)
    constants: dict[str, Any] = {
        "VOCAB": vocab,
        "WIDTH": width,
        "GRADIENT": scale is not None,
        "IGNORED": IGNORED,
        "BLOCK": block,
        "SPAN": 16 // logits_TW.itemsize,
        "num_warps": warps,
    }
    factor = 0.0 if scale is None else scale
    _cross_entropy_kernel[(tokens,)](logits_TW, labels_T, losses_T, lse_T, factor, **constants)


def sizes(vocab: int, itemsize: int) -> tuple[int, int]:
    """Columns that a program works on at once, 32 bytes a thread, and its warps.

    A row is read twice, the second time from the caches if the rows in work fit there together. In 16-bit types
    registers allow one program of 32 warps on a multiprocessor: 132 rows of 151,936 columns take 40 MB.
    """
    row = vocab * itemsize
    warps = 32 if row > 2**17 else 16 if row > 2**16 else 8
    of_a_warp = 1024 // itemsize
    block = min(warps * of_a_warp, max(power_of_2(vocab), of_a_warp))
    return block, block // of_a_warp


@triton.jit
def _cross_entropy_kernel(
    logits,
    labels,
    losses,
    lse,
    scale,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,  # neighbouring columns in one thread, 16 bytes
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * WIDTH
    lines = tl.arange(0, BLOCK // SPAN)
    columns = lines[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    blocks = tl.cdiv(WIDTH, BLOCK)
    label = tl.load(labels + token)
    if label == IGNORED:
        tl.store(losses + token, 0.0)
        tl.store(lse + token, 0.0)
        if GRADIENT:
            for i in range(blocks):
                place = i * BLOCK + columns
                tl.store(row + place, tl.zeros_like(columns).to(logits.dtype.element_ty), mask=place < WIDTH)
    else:
        target = tl.load(row + label).to(tl.float32)  # the reductions below keep it before the stores
        # Each thread has maxima and sums of its own, so that warps do not wait for one another in the loop. The lowest
        # number instead of -inf: the difference of two of them is 0.
        tops = tl.full([BLOCK // SPAN], -3.4028234663852886e38, tl.float32)
        sums = tl.zeros([BLOCK // SPAN], tl.float32)
        for i in range(blocks):
            place = i * BLOCK + columns
            x = tl.load(row + place, mask=place < WIDTH, other=float("-inf")).to(tl.float32)
            if VOCAB < WIDTH:  # the mask is the aligned width, as one that cuts a thread's span makes narrow accesses
                x = tl.where(place < VOCAB, x, float("-inf"))
            new_tops = tl.maximum(tops, tl.max(x, 1))
            sums = sums * tl.exp(tops - new_tops) + tl.sum(tl.exp(x - new_tops[:, None]), 1)
            tops = new_tops
        top = tl.max(tops, 0)
        total = tl.sum(sums * tl.exp(tops - top), 0)
        log_total = tl.log(total)
        tl.store(losses + token, log_total + (top - target))
        tl.store(lse + token, log_total + top)
        if GRADIENT:
            factor = scale / total
            target_place = label.to(tl.int32)
            for i in range(blocks):
                place = (blocks - 1 - i) * BLOCK + columns  # backwards: what was read last is still in the caches
                x = tl.load(row + place, mask=place < WIDTH, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(x - top) * factor - tl.where(place == target_place, scale, 0.0)
                tl.store(row + place, gradient.to(logits.dtype.element_ty), mask=place < WIDTH)


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
