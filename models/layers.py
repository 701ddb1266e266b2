"""The layers that the models are made of: the decoder block, and the head with its loss.

They compute forward and backward explicitly (models/spec.py has the contract and the shape suffixes). Between
operations values are rounded to the model's dtype where Hugging Face's modelling code rounds them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import attention as attn
from rptrain.kernels.linear import accumulate_weight_grad, linear, linear_backward_input
from rptrain.kernels.linear_cross_entropy import (
    chunk_tokens,
    linear_cross_entropy,
    linear_cross_entropy_backward,
)
from rptrain.kernels.reference import (
    rms_norm,
    rms_norm_backward,
    rope,
    rope_backward,
    swiglu,
    swiglu_backward,
)
from rptrain.models.block import BlockShape
from rptrain.models.spec import Grads, MicroBatch, Params
from rptrain.plan.costs import Work

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]  # q, k, v to out, and what backward needs


class AttentionSaved(NamedTuple):
    x: Tensor  # [T, D]
    rstd: Tensor  # [T]
    normed: Tensor  # [T, D]
    raw: tuple[Tensor, Tensor, Tensor, Tensor] | None  # with q/k norm: q and k before it, 1 / rms of each
    q: Tensor  # [T, H, C], rotated; k, v [T, K, C]
    k: Tensor
    v: Tensor
    out: Tensor  # [T, H, C]
    attention: Any  # attn.Saved


class MLPSaved(NamedTuple):
    x: Tensor  # [T, D]
    rstd: Tensor  # [T]
    normed: Tensor  # [T, D]
    gate_up: Tensor  # [T, 2I]; its SwiGLU is computed again


@dataclass(frozen=True, kw_only=True)
class Block(BlockShape):
    """A pre-norm decoder block: grouped-query attention with rotary positions, then SwiGLU.

    Parameters: input_norm [D], qkv [(H + 2K) C, D], q_norm and k_norm [C] where `qk_norm`, o [D, H C],
    post_norm [D], gate_up [2I, D], down [D, I].
    """

    eps: float
    attention_backend: str | None = None  # None: kernels/attention.py chooses

    def forward(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor:
        return self.step(p, x_TD, mb.cos, mb.sin, self._attend(mb))

    def step(self, p: Params, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Forward with the caller's attention over the rotated q, k and v, as decoding with a cache needs."""
        h_TD = self._attention(p, x_TD, cos, sin, attend)[0]
        return self._mlp(p, h_TD)[0]

    def forward_saved(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[Tensor, tuple[AttentionSaved, MLPSaved]]:
        h_TD, attention = self._attention(p, x_TD, mb.cos, mb.sin, self._attend(mb))
        y_TD, mlp = self._mlp(p, h_TD)
        return y_TD, (attention, mlp)

    def backward(
        self, p: Params, g: Grads, saved: tuple[AttentionSaved, MLPSaved], dy_TD: Tensor, mb: MicroBatch
    ) -> Tensor:
        attention, mlp = saved
        return self._attention_backward(p, g, attention, self._mlp_backward(p, g, mlp, dy_TD), mb)

    def mlp_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        matmul = 6.0 * tokens * self.hidden * self.intermediate
        size = tokens * itemsize
        # the activation and the addition; the activation again and backward, the norm's backward with the residual
        return (
            Work(matmul=matmul, traffic=size * (3 * self.intermediate + 3 * self.hidden)),
            Work(matmul=2 * matmul, traffic=size * (8 * self.intermediate + 4 * self.hidden)),
        )

    def mlp_kept(self, itemsize: int) -> int:
        return itemsize * (2 * self.hidden + 2 * self.intermediate) + max(itemsize, 4)

    def mlp_workspace(self, itemsize: int) -> tuple[int, int]:
        inside = max(3 * self.intermediate + self.hidden, 5 * self.hidden)  # SwiGLU and its products, a norm
        return itemsize * (2 * self.hidden + 3 * self.intermediate), max(itemsize, 4) * inside

    def _attend(self, mb: MicroBatch) -> Attend:
        return lambda q, k, v: attn.attention(q, k, v, mb, self.attention_backend)

    def _attention(
        self, p: Params, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, AttentionSaved]:
        normed, rstd = rms_norm(x_TD, p["input_norm"], self.eps)
        q, k, v = linear(normed, p["qkv"]).unflatten(-1, (-1, self.head_size)).split(self._head_counts, 1)
        raw = None
        if self.qk_norm:
            (q_normed, q_rstd), (k_normed, k_rstd) = (
                rms_norm(q, p["q_norm"], self.eps),
                rms_norm(k, p["k_norm"], self.eps),
            )
            raw = (q, k, q_rstd, k_rstd)
            q, k = q_normed, k_normed
        else:
            v = v.contiguous()  # a view would keep the whole product alive
        q, k = rope(q, k, cos, sin)
        out, attention = attend(q, k, v)
        h_TD = x_TD + linear(out.flatten(1), p["o"])
        return h_TD, AttentionSaved(x_TD, rstd, normed, raw, q, k, v, out, attention)

    def _attention_backward(self, p: Params, g: Grads, saved: AttentionSaved, dh_TD: Tensor, mb: MicroBatch) -> Tensor:
        accumulate_weight_grad(g["o"], dh_TD, saved.out.flatten(1))
        dout = linear_backward_input(dh_TD, p["o"]).view_as(saved.out)
        dq, dk, dv = attn.attention_backward(dout, saved.q, saved.k, saved.v, saved.out, saved.attention, mb)
        dq, dk = rope_backward(dq, dk, mb.cos, mb.sin)
        if saved.raw is not None:
            q, k, q_rstd, k_rstd = saved.raw
            dq = rms_norm_backward(dq, q, p["q_norm"], q_rstd, g["q_norm"])
            dk = rms_norm_backward(dk, k, p["k_norm"], k_rstd, g["k_norm"])
        dqkv = torch.cat((dq, dk, dv), 1).flatten(1)
        accumulate_weight_grad(g["qkv"], dqkv, saved.normed)
        dnormed = linear_backward_input(dqkv, p["qkv"])
        return dh_TD + rms_norm_backward(dnormed, saved.x, p["input_norm"], saved.rstd, g["input_norm"])

    def _mlp(self, p: Params, x_TD: Tensor) -> tuple[Tensor, MLPSaved]:
        normed, rstd = rms_norm(x_TD, p["post_norm"], self.eps)
        gate_up = linear(normed, p["gate_up"])
        return x_TD + linear(swiglu(gate_up), p["down"]), MLPSaved(x_TD, rstd, normed, gate_up)

    def _mlp_backward(self, p: Params, g: Grads, saved: MLPSaved, dy_TD: Tensor) -> Tensor:
        accumulate_weight_grad(g["down"], dy_TD, swiglu(saved.gate_up))
        dgate_up = swiglu_backward(linear_backward_input(dy_TD, p["down"]), saved.gate_up)
        accumulate_weight_grad(g["gate_up"], dgate_up, saved.normed)
        dnormed = linear_backward_input(dgate_up, p["gate_up"])
        return dy_TD + rms_norm_backward(dnormed, saved.x, p["post_norm"], saved.rstd, g["post_norm"])

    @property
    def _head_counts(self) -> list[int]:
        return [self.heads, self.kv_heads, self.kv_heads]


@dataclass(frozen=True)
class Head:
    """Final norm, output projection and loss. Parameters: norm [D], and `projection` [V, D]."""

    norm_unit: int
    projection_unit: int
    projection: str  # "embed" where the embedding table is the projection (tied), else "head"
    hidden: int
    vocab: int
    eps: float
    name: str = "head"

    @property
    def units(self) -> tuple[int, ...]:
        return (self.norm_unit, self.projection_unit)

    def loss(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor:
        normed, _ = rms_norm(x_TD, p["norm"], self.eps)
        return linear_cross_entropy(normed, p[self.projection], mb.labels)

    def loss_backward(self, p: Params, g: Grads, x_TD: Tensor, mb: MicroBatch, scale: float) -> tuple[Tensor, Tensor]:
        normed, rstd = rms_norm(x_TD, p["norm"], self.eps)
        loss, dnormed = linear_cross_entropy_backward(normed, p[self.projection], mb.labels, scale, g[self.projection])
        return loss, rms_norm_backward(dnormed, x_TD, p["norm"], rstd, g["norm"])

    def logits(self, p: Params, x_TD: Tensor) -> Tensor:
        """[T, V] in the model's dtype."""
        return linear(rms_norm(x_TD, p["norm"], self.eps)[0], p[self.projection])

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        """The logits are written and read by the softmax; of their gradient, only its writing is counted."""
        matmul = 2.0 * tokens * self.hidden * self.vocab
        size = tokens * itemsize
        return (
            Work(matmul=matmul, traffic=size * (2 * self.hidden + 2 * self.vocab)),
            Work(matmul=2 * matmul, traffic=size * (3 * self.hidden + self.vocab)),
        )

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        return 0

    def workspace_bytes(self, tokens: int, itemsize: int) -> int:
        """The norm's output, gradients of both, one chunk of logits and its gradient."""
        wide = max(itemsize, 4)
        chunk = min(chunk_tokens(self.vocab), tokens)
        return tokens * self.hidden * (3 * itemsize + 4 * wide) + chunk * self.vocab * (2 * itemsize + wide)
