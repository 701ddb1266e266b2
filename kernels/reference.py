"""Every operation in plain PyTorch: the oracle, the path of the CPU and of dtypes without a fused kernel.

Forward and explicit backward, for bfloat16, float16, float32 and float64, on any device. Inside, 16-bit types
are widened to float32; results are rounded once, or where Hugging Face's modelling code rounds. Suffixes are
those of models/spec.py; R rows and L tokens a row, G = H / K query heads a key head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

QUERIES = 256  # of a row at a time: bounds the scores held in attention


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics, sums and gradient accumulators for a model of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dimension: y like x [..., D]; 1 / rms [...] in the wide type."""
    x_wide = x.to(wide(x.dtype))
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (x_wide * rstd).to(x.dtype) * weight, rstd.squeeze(-1)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_weight: Tensor) -> Tensor:
    """dx like x; adds the weight's gradient to `grad_weight` [D] in the wide type."""
    dtype = wide(x.dtype)
    dy_wide, normed = dy.to(dtype), x.to(dtype) * rstd.unsqueeze(-1)
    grad_weight += (dy_wide * normed).flatten(0, -2).sum(0)
    scaled = dy_wide * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx.to(x.dtype)


def rope(q_THC: Tensor, k_TKC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates (x[i], x[i + C/2]) by the angle whose cosine and sine are cos, sin [T, C/2]."""
    return _rotate(q_THC, cos, sin), _rotate(k_TKC, cos, sin)


def rope_backward(dq_THC: Tensor, dk_TKC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The transposed rotation, which is the one by the opposite angle."""
    return _rotate(dq_THC, cos, -sin), _rotate(dk_TKC, cos, -sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, I] of the fused product [T, 2I], gate first."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of the fused product [T, 2I]."""
    gate, up = gate_up.chunk(2, -1)
    sigmoid = torch.sigmoid(gate.to(wide(gate.dtype)))
    silu = gate * sigmoid
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, -1)
    d_up.copy_(dy * silu)
    slope = (1 - sigmoid).mul_(silu).add_(sigmoid)
    d_gate.copy_(slope.mul_(up).mul_(dy))
    return d_gate_up


def attention(
    q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, positions: Tensor, rows: int, length: int
) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents: out [T, H, C], and the scores' log-sum-exp [T, H] in the wide type.

    Token i of a row sees the tokens from i - positions[i], where its document starts, to itself. What it
    does not see has probability 0 exactly, so documents do not touch one another's results at all.
    """
    heads = _Heads(q_THC, k_TKC, rows, length)
    keys, values = heads.by_row(k_TKC), heads.by_row(v_TKC)
    out = torch.empty_like(q_THC, memory_format=torch.contiguous_format)
    lse = torch.empty(q_THC.shape[:2], dtype=keys.dtype, device=q_THC.device)
    for queries, visible, hidden in _spans(positions, rows, length):
        scores = heads.scores(heads.by_group(q_THC, queries), keys[:, visible], hidden)
        chunk_lse = scores.logsumexp(-1, keepdim=True)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; probabilities are computed again from the log-sum-exp (FlashAttention-2, algorithm 2)."""
    heads = _Heads(q_THC, k_TKC, rows, length)
    keys, values = heads.by_row(k_TKC), heads.by_row(v_TKC)
    dq = torch.empty_like(q_THC, memory_format=torch.contiguous_format)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for queries, visible, hidden in _spans(positions, rows, length):
        q, do = heads.by_group(q_THC, queries), heads.by_group(dout, queries)
        scores = heads.scores(q, keys[:, visible], hidden)
        probs = (scores - heads.by_group(lse.unsqueeze(-1), queries)).exp_()
        dv[:, visible] += probs.mT @ do
        delta = (do * heads.by_group(out, queries)).sum(-1, keepdim=True)
        dscores = probs * (do @ values[:, visible].mT - delta) * heads.scale
        heads.store(dq, queries, dscores @ keys[:, visible])
        dk[:, visible] += dscores.mT @ q
    return dq, heads.by_token(dk).to(k_TKC.dtype), heads.by_token(dv).to(v_TKC.dtype)


def _spans(positions: Tensor, rows: int, length: int):
    """Chunks of queries, the keys that any of them sees, and which of these each does not: [R, Q, S]."""
    index = torch.arange(length, device=positions.device)
    starts = index - positions.view(rows, length)
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

    def __init__(self, q_THC: Tensor, k_TKC: Tensor, rows: int, length: int):
        _, heads, size = q_THC.shape
        self.rows, self.length, self.kv_heads = rows, length, k_TKC.shape[1]
        self.groups = heads // self.kv_heads
        self.scale = size**-0.5
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
