"""The layers that the models are made of: the decoder block, and the head with its loss.

They compute forward and backward explicitly (models/spec.py has the contract and the shape suffixes). Between
operations values are rounded to the model's dtype where Hugging Face's modelling code rounds them, except that the
MLP's product and its residual are added before rounding. Backward takes over what forward saved: the gradients of the
products qkv and gate_up are written over them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rptrain.kernels import attention as attn
from rptrain.kernels.linear import accumulate_weight_grad, linear, linear_add, linear_backward_input
from rptrain.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
    loss_workspace_bytes,
)
from rptrain.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from rptrain.kernels.rope import QKNorm, qk_norm_rope, qk_norm_rope_backward
from rptrain.kernels.swiglu import swiglu, swiglu_backward
from rptrain.models.block import BlockShape, scaled
from rptrain.models.spec import Grads, MicroBatch, Params
from rptrain.plan.costs import Work

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]  # q, k, v to out, and what backward needs


class AttentionSaved(NamedTuple):
    x: Tensor  # [T, D]
    rstd: Tensor  # [T]
    normed: Tensor  # [T, D]
    qkv: Tensor  # [T, (H + 2K) C]; v is a view of it, and without q/k norm q and k are too
    qk_rstd: Tensor | None  # [T, H + K], with q/k norm
    q: Tensor  # [T, H, C], rotated; k, v [T, K, C]
    k: Tensor
    v: Tensor
    out: Tensor  # [T, H, C]
    attention: Any  # attn.Saved


class MLPSaved(NamedTuple):
    x: Tensor  # [T, D]
    rstd: Tensor  # [T]
    normed: Tensor  # [T, D]
    gate_up: Tensor  # [T, 2I]; backward computes its SwiGLU again


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
        product = self._attention(p, x_TD, cos, sin, attend)[0]
        mlp = self._mlp(p, product, x_TD)
        return linear_add(swiglu(mlp.gate_up), p["down"], mlp.x, overwrite=True)

    def forward_saved(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[Tensor, tuple[AttentionSaved, MLPSaved]]:
        attention, mlp = self.recompute(p, x_TD, mb)
        return linear_add(swiglu(mlp.gate_up), p["down"], mlp.x), (attention, mlp)

    def recompute(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[AttentionSaved, MLPSaved]:
        product, attention = self._attention(p, x_TD, mb.cos, mb.sin, self._attend(mb))
        return attention, self._mlp(p, product, x_TD)

    def backward(
        self, p: Params, g: Grads, saved: tuple[AttentionSaved, MLPSaved], dy_TD: Tensor, mb: MicroBatch
    ) -> Tensor:
        attention, mlp = saved
        return self._attention_backward(p, g, attention, self._mlp_backward(p, g, mlp, dy_TD), mb)

    def mlp_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        matmul = 6.0 * tokens * self.hidden * self.intermediate
        forward = {"activation": 3 * self.intermediate, "sum": 3 * self.hidden}
        # the activation's backward writes the activation again
        backward = {"activation, backward": 6 * self.intermediate, "norm and sum, backward": 4 * self.hidden}
        return (
            Work(matmul=matmul, elementwise=scaled(forward, tokens * itemsize)),
            Work(matmul=2 * matmul, elementwise=scaled(backward, tokens * itemsize)),
        )

    def mlp_kept(self, itemsize: int) -> int:
        return itemsize * (2 * self.hidden + 2 * self.intermediate) + max(itemsize, 4)

    def mlp_workspace(self, itemsize: int) -> tuple[int, int]:
        # the activation, gradients on both sides of the norm; SwiGLU with the activation again, products, a norm
        wide = max(itemsize, 4)
        inside = max(3 * wide * self.intermediate + itemsize * self.intermediate, 5 * wide * self.hidden)
        return itemsize * (2 * self.hidden + self.intermediate), inside

    def _attend(self, mb: MicroBatch) -> Attend:
        return lambda q, k, v: attn.attention(q, k, v, mb, self.attention_backend)

    def _attention(
        self, p: Params, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, AttentionSaved]:
        """The output projection's product [T, D], which the residual is yet to be added to."""
        normed, rstd = rms_norm(x_TD, p["input_norm"], self.eps)
        qkv = linear(normed, p["qkv"])
        q, k, v, qk_rstd = qk_norm_rope(qkv, cos, sin, self.kv_heads, self._norms(p))
        out, attention = attend(q, k, v)
        saved = AttentionSaved(x_TD, rstd, normed, qkv, qk_rstd, q, k, v, out, attention)
        return linear(out.flatten(1), p["o"]), saved

    def _attention_backward(self, p: Params, g: Grads, saved: AttentionSaved, dh_TD: Tensor, mb: MicroBatch) -> Tensor:
        accumulate_weight_grad(g["o"], dh_TD, saved.out.flatten(1))
        dqkv = qk_norm_rope_backward(
            *self._attend_backward(linear_backward_input(dh_TD, p["o"]), saved, mb),
            saved.qkv,
            mb.cos,
            mb.sin,
            self._norms(p),
            saved.qk_rstd,
            (g["q_norm"], g["k_norm"]) if self.qk_norm else None,
        )
        accumulate_weight_grad(g["qkv"], dqkv, saved.normed)
        dnormed = linear_backward_input(dqkv, p["qkv"])
        return rms_norm_backward(dnormed, saved.x, p["input_norm"], saved.rstd, g["input_norm"], dh_TD)

    def _attend_backward(self, dout: Tensor, saved: AttentionSaved, mb: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        dout = dout.view_as(saved.out)
        return attn.attention_backward(dout, saved.q, saved.k, saved.v, saved.out, saved.attention, mb)

    def _mlp(self, p: Params, product: Tensor, x_TD: Tensor) -> MLPSaved:
        """Up to the product before the activation, of attention's product and the block's input."""
        h_TD, normed, rstd = add_rms_norm(product, x_TD, p["post_norm"], self.eps)
        return MLPSaved(h_TD, rstd, normed, linear(normed, p["gate_up"]))

    def _mlp_backward(self, p: Params, g: Grads, saved: MLPSaved, dy_TD: Tensor) -> Tensor:
        activation = linear_backward_input(dy_TD, p["down"])  # its gradient, until it is written over
        dgate_up = swiglu_backward(activation, saved.gate_up, saved.gate_up, activation)
        accumulate_weight_grad(g["down"], dy_TD, activation)
        accumulate_weight_grad(g["gate_up"], dgate_up, saved.normed)
        dnormed = linear_backward_input(dgate_up, p["gate_up"])
        return rms_norm_backward(dnormed, saved.x, p["post_norm"], saved.rstd, g["post_norm"], dy_TD)

    def _norms(self, p: Params) -> QKNorm | None:
        return QKNorm(p["q_norm"], p["k_norm"], self.eps) if self.qk_norm else None


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
        """The softmax reads the logits, and in backward writes their gradient; they are computed once for both."""
        matmul = 2.0 * tokens * self.hidden * self.vocab
        forward = {"norm": 2 * self.hidden, "softmax": self.vocab}
        backward = {"norm, backward": 3 * self.hidden, "softmax, backward": self.vocab}
        return (
            Work(matmul=matmul, elementwise=scaled(forward, tokens * itemsize)),
            Work(matmul=2 * matmul, elementwise=scaled(backward, tokens * itemsize)),
        )

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        return 0

    def workspace_bytes(self, tokens: int, itemsize: int) -> int:
        """The norm's output, gradients of both, and one chunk of logits."""
        wide = max(itemsize, 4)
        return tokens * self.hidden * (3 * itemsize + 4 * wide) + loss_workspace_bytes(tokens, self.vocab, itemsize)
