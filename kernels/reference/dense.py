"""Every operation in plain PyTorch: the reference, the path of the CPU and of dtypes without a fused kernel.

Forward and explicit backward, for bfloat16, float16, float32 and float64, on any device. Inside, 16-bit types
are upcast to float32; results are rounded once, or where Hugging Face's modelling code rounds. Suffixes are
those of models/layer.py; R rows and L tokens a row, G = H / K query heads a key head.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels.batch import IGNORED, Rotation

QUERIES = 256  # of a row at a time: bounds the scores held in attention


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics, sums and gradient accumulators for a model of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dimension: y like x [..., D]; 1 / rms [...] in the wide type.

    `zero_centered`: the factor is 1 + weight, and the result is rounded once.
    """
    x_wide = x.to(wide(x.dtype))
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (x_wide * rstd * (1 + weight.to(x_wide.dtype))).to(x.dtype), rstd.squeeze(-1)
    return (x_wide * rstd).to(x.dtype) * weight, rstd.squeeze(-1)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    grad_weight: Tensor | None,
    dresidual: Tensor | None = None,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """dx like x, plus `dresidual`; adds the weight's gradient to `grad_weight` [D], if any, in the wide type."""
    dtype = wide(x.dtype)
    dy_wide, normed = dy.to(dtype), x.to(dtype) * rstd.unsqueeze(-1)
    if grad_weight is not None:
        grad_weight += (dy_wide * normed).flatten(0, -2).sum(0)
    scaled = dy_wide * (1 + weight.to(dtype) if zero_centered else weight)
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return (dx if dresidual is None else dx + dresidual).to(x.dtype)


def rope(q_THC: Tensor, k_TKC: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """Rotates (x[i], x[i + R/2]) of the first R columns by the angle of the tables [T, R/2]."""
    if rotation is None:
        return q_THC, k_TKC
    q, k = (_rotate(x, rotation.cos, rotation.sin) for x in (q_THC, k_TKC))
    factor = rotation.query_factor
    return (q if factor is None else (q * factor[:, None, None]).to(q.dtype)), k


def rope_backward(dq_THC: Tensor, dk_TKC: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """The transposed rotation, which is the one by the opposite angle."""
    return rope(dq_THC, dk_TKC, None if rotation is None else rotation._replace(sin=-rotation.sin))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[1]
    first, second, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), -1)
    first, second = first.to(cos.dtype), second.to(cos.dtype)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*(half.to(x.dtype) for half in rotated), rest), -1)


class QKNorm(NamedTuple):
    """Norms that queries and keys pass before they are rotated.

    They are of each head, with weights [C], or, if `whole`, of all heads of a token, with weights [H C] and [K C].
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    whole: bool = False
    zero_centered: bool = False  # factors are 1 + weight; only of each head


def split_heads(qkv: Tensor, kv_heads: int, size: int, *, gated: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, C], k and v [T, K, C], views of the fused product [T, (H + 2K) C], or [T, (2H + 2K) C] if `gated`."""
    heads = qkv.view(len(qkv), qkv.shape[1] // size, size)
    count = heads.shape[1] - 2 * kv_heads
    return heads[:, : count : 1 + gated], heads[:, count : count + kv_heads], heads[:, count + kv_heads :]


def split_gates(qkv: Tensor, kv_heads: int, size: int) -> Tensor:
    """The gates [T, H, C], a view of the fused product [T, (2H + 2K) C], which has each one behind its query."""
    heads = qkv.view(len(qkv), qkv.shape[1] // size, size)
    return heads[:, 1 : heads.shape[1] - 2 * kv_heads : 2]


def qk_norm_rope(
    qkv: Tensor, rotation: Rotation | None, kv_heads: int, size: int, norm: QKNorm | None = None, *, gated: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and 1 / rms, [T, H + K] or [T, 2], as in kernels/rope.py: without norms q and k are rotated in place."""
    q, k, v = split_heads(qkv, kv_heads, size, gated=gated)
    if norm is None:
        for x, rotated in zip((q, k), rope(q, k, rotation), strict=True):
            x.copy_(rotated)
        return q, k, v, None
    wide_q, wide_k = (x.flatten(1).unsqueeze(1) if norm.whole else x for x in (q, k))
    q_normed, q_rstd = rms_norm(wide_q, norm.q_weight, norm.eps, zero_centered=norm.zero_centered)
    k_normed, k_rstd = rms_norm(wide_k, norm.k_weight, norm.eps, zero_centered=norm.zero_centered)
    q_normed, k_normed = q_normed.view(q.shape), k_normed.view(k.shape)
    return *rope(q_normed, k_normed, rotation), v, torch.cat((q_rstd, k_rstd), 1)


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
    """The gradient of the product, written over it; gates are left as they are."""
    q, k, v = split_heads(qkv, dk.shape[1], dk.shape[2], gated=gated)
    dq, dk = rope_backward(dq, dk, rotation)
    if norm is not None and rstd is not None and grads is not None:
        if norm.whole:
            (dq, dk), sizes = (x.flatten(1).unsqueeze(1) for x in (dq, dk)), (1, 1)
        else:
            sizes = q.shape[1], k.shape[1]
        q_rstd, k_rstd = rstd.split(sizes, 1)
        dq, dk = (
            rms_norm_backward(dy, x.reshape(dy.shape), weight, each, grad, zero_centered=norm.zero_centered).view(
                x.shape
            )
            for dy, x, weight, each, grad in zip((dq, dk), (q, k), norm[:2], (q_rstd, k_rstd), grads, strict=True)
        )
    for place, gradient in ((q, dq), (k, dk), (v, dv)):
        place.copy_(gradient)
    return qkv


def output_gate(out_THC: Tensor, gate_THC: Tensor) -> Tensor:
    """out * sigmoid(gate) [T, H C], the sigmoid rounded before."""
    return (out_THC * torch.sigmoid(gate_THC)).flatten(1)


def output_gate_backward(dy: Tensor, out_THC: Tensor, gate_THC: Tensor) -> Tensor:
    """dout [T, H, C]; writes the gate's gradient over the gate, and `output_gate` over dy [T, H C]."""
    dtype = wide(dy.dtype)
    again, sigmoid = output_gate(out_THC, gate_THC), torch.sigmoid(gate_THC.to(dtype))
    dout = sigmoid * dy.view_as(out_THC)
    gate_THC.copy_((1 - sigmoid).mul_(dout).mul_(out_THC))
    dy.copy_(again)
    return dout.to(dy.dtype)


class Clamp(NamedTuple):
    """GPT-OSS's form of SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), both held to the limit before."""

    alpha: float = 1.702
    limit: float = 7.0


def swiglu(gate_up: Tensor, interleaved: bool = False, clamp: Clamp | None = None) -> Tensor:
    """silu(gate) * up [T, I] of the fused product [T, 2I], gate first or `interleaved` with up."""
    gate, up = _gate_and_up(gate_up, interleaved)
    if clamp is None:
        return F.silu(gate) * up
    gate = gate.clamp(max=clamp.limit)
    glu = gate * (gate * clamp.alpha).sigmoid_()
    del gate
    return glu * up.clamp(-clamp.limit, clamp.limit).add_(1)


def swiglu_backward(
    dy: Tensor,
    gate_up: Tensor,
    out: Tensor | None = None,
    activation: Tensor | None = None,
    interleaved: bool = False,
    clamp: Clamp | None = None,
) -> Tensor:
    """The gradient [T, 2I] of the product in `out`, which may be gate_up; `swiglu` in `activation`, which may be dy."""
    dtype = wide(gate_up.dtype)
    again = None if activation is None else swiglu(gate_up, interleaved, clamp)
    out = torch.empty_like(gate_up) if out is None else out
    gate, up = _gate_and_up(gate_up, interleaved)
    if clamp is None:
        sigmoid = torch.sigmoid(gate.to(dtype))
        glu = gate * sigmoid
        slope = (1 - sigmoid).mul_(glu).add_(sigmoid).mul_(up)
    else:
        held = gate.clamp(max=clamp.limit)
        sigmoid = held.to(dtype).mul(clamp.alpha).sigmoid_()
        glu = held * sigmoid
        slope = (1 - sigmoid).mul_(glu).mul_(clamp.alpha).add_(sigmoid)
        del held, sigmoid
        slope.mul_(up.clamp(-clamp.limit, clamp.limit).to(dtype).add_(1)).masked_fill_(gate > clamp.limit, 0)
        glu.masked_fill_(up.abs() > clamp.limit, 0)
    d_gate, d_up = _gate_and_up(out, interleaved)
    d_gate.copy_(slope.mul_(dy))
    d_up.copy_(glu.mul_(dy))
    if activation is not None and again is not None:
        activation.copy_(again)
    return out


def _gate_and_up(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, -1)
    return gate, up


def cross_entropy_(logits_TV: Tensor, labels_T: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp [T] of each row in the wide type, 0 for ignored rows. The logits are used up:

    given `scale`, the gradient of `scale` times the loss replaces them.
    """
    x = logits_TV.to(wide(logits_TV.dtype))
    supervised = labels_T != IGNORED
    place = labels_T.clamp(min=0).unsqueeze(1)
    target = x.gather(1, place)
    top = x.amax(1, keepdim=True)
    exps = x.sub_(top).exp_()
    total = exps.sum(1, keepdim=True)
    losses = torch.where(supervised, (total.log() + (top - target)).squeeze(1), 0)
    lse = torch.where(supervised, (total.log() + top).squeeze(1), 0)
    if scale is not None:
        at_target = ((target - top).exp() / total - 1) * scale
        exps.mul_(scale / total).scatter_(1, place, at_target)
        logits_TV.copy_(exps.masked_fill_(~supervised.unsqueeze(1), 0))
    return losses, lse


def attention(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    positions: Tensor,
    rows: int,
    length: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents: out [T, H, C], and the scores' log-sum-exp [T, H] in the wide type.

    Token i of a row sees the tokens from i - positions[i], where its document starts, to itself, and the last
    `window` of these at most. What it does not see has probability 0 exactly, so documents do not touch one
    another's results at all. `sinks` [H] (GPT-OSS): one more score a head, whose probability is left out of the sum.
    `scale` is the factor of the scores, by default C ** -0.5.
    """
    heads = _Heads(q_THC, k_TKC, rows, length, scale)
    keys, values = heads.by_row(k_TKC), heads.by_row(v_TKC)
    out = torch.empty_like(q_THC, memory_format=torch.contiguous_format)
    lse = torch.empty(q_THC.shape[:2], dtype=keys.dtype, device=q_THC.device)
    sink = None if sinks is None else sinks.expand(lse.shape).unsqueeze(-1)
    for queries, visible, hidden in _spans(positions, rows, length, window):
        scores = heads.scores(heads.by_group(q_THC, queries), keys[:, visible], hidden)
        chunk_lse = scores.logsumexp(-1, keepdim=True)
        if sink is not None:
            chunk_lse = torch.logaddexp(chunk_lse, heads.by_group(sink, queries))
        heads.store(lse.unsqueeze(-1), queries, chunk_lse)
        heads.store(out, queries, (scores - chunk_lse).exp_() @ values[:, visible])
    return out, lse


def attention_backward(
    dout: Tensor,
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out: Tensor,
    lse: Tensor,
    positions: Tensor,
    rows: int,
    length: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    grad_sinks: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; probabilities are computed again from the log-sum-exp (FlashAttention-2, algorithm 2).

    Adds the sinks' gradient to `grad_sinks` [H] in the wide type.
    """
    heads = _Heads(q_THC, k_TKC, rows, length, scale)
    keys, values = heads.by_row(k_TKC), heads.by_row(v_TKC)
    dq = torch.empty_like(q_THC, memory_format=torch.contiguous_format)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for queries, visible, hidden in _spans(positions, rows, length, window):
        q, do = heads.by_group(q_THC, queries), heads.by_group(dout, queries)
        scores = heads.scores(q, keys[:, visible], hidden)
        probs = (scores - heads.by_group(lse.unsqueeze(-1), queries)).exp_()
        dv[:, visible] += probs.mT @ do
        delta = (do * heads.by_group(out, queries)).sum(-1, keepdim=True)
        dscores = probs * (do @ values[:, visible].mT - delta) * heads.scale
        heads.store(dq, queries, dscores @ keys[:, visible])
        dk[:, visible] += dscores.mT @ q
    if sinks is not None and grad_sinks is not None:
        delta = (dout.to(lse.dtype) * out).sum(-1)
        grad_sinks -= ((sinks - lse).exp() * delta).sum(0)
    return dq, heads.by_token(dk).to(k_TKC.dtype), heads.by_token(dv).to(v_TKC.dtype)


def _spans(positions: Tensor, rows: int, length: int, window: int | None):
    """Chunks of queries, the keys that any of them sees, and which of these each does not: [R, Q, S]."""
    index = torch.arange(length, device=positions.device)
    seen_before = positions if window is None else positions.clamp(max=window - 1)
    starts = index - seen_before.view(rows, length)
    for begin in range(0, length, QUERIES):
        end = min(begin + QUERIES, length)
        first = int(starts[:, begin:end].min())
        keys = index[first:end]
        hidden = (keys > index[begin:end, None]) | (keys < starts[:, begin:end, None])
        yield slice(begin, end), slice(first, end), hidden


class _Heads:
    """Layouts of tokens x heads as batches of matrices, one for each row and key head: [R * K, ..., C].

    The G query heads that share a key head are rows of one matrix, so keys are never repeated.
    """

    def __init__(self, q_THC: Tensor, k_TKC: Tensor, rows: int, length: int, scale: float | None):
        _, heads, size = q_THC.shape
        self.rows, self.length, self.kv_heads = rows, length, k_TKC.shape[1]
        self.groups = heads // self.kv_heads
        self.scale = scale or size**-0.5
        self.dtype = wide(q_THC.dtype)

    def by_row(self, x_TKC: Tensor) -> Tensor:
        x = x_TKC.reshape(self.rows, self.length, self.kv_heads, -1).transpose(1, 2)
        return x.to(self.dtype).reshape(self.rows * self.kv_heads, self.length, -1)

    def by_token(self, x: Tensor) -> Tensor:
        x = x.view(self.rows, self.kv_heads, self.length, -1).transpose(1, 2)
        return x.reshape(self.rows * self.length, self.kv_heads, -1)

    def by_group(self, x_THC: Tensor, queries: slice) -> Tensor:
        x = self._grouped(x_THC)[:, queries].permute(0, 2, 1, 3, 4).to(self.dtype)
        return x.reshape(self.rows * self.kv_heads, -1, x.shape[-1])

    def store(self, x_THC: Tensor, queries: slice, values: Tensor) -> None:
        place = self._grouped(x_THC)[:, queries].permute(0, 2, 1, 3, 4)
        place.copy_(values.view(place.shape))

    def scores(self, q: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        scores = (q @ keys.mT).mul_(self.scale)
        rows, queries, visible = hidden.shape
        by_head = scores.view(rows, self.kv_heads, queries, self.groups, visible)
        by_head.masked_fill_(hidden.view(rows, 1, queries, 1, visible), float("-inf"))
        return scores

    def _grouped(self, x_THC: Tensor) -> Tensor:
        return x_THC.view(self.rows, self.length, self.kv_heads, self.groups, x_THC.shape[-1])
