"""Operations as autograd functions, so that `torch.autograd` and `gradcheck` can test their backward passes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.attention import attention, attention_backward
from rptrain.kernels.batch import IGNORED, MicroBatch, Rotation
from rptrain.kernels.dropout import Dropout
from rptrain.kernels.grouped import grouped_bias_grad, grouped_mm, grouped_weight_grad
from rptrain.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_backward
from rptrain.kernels.lora import add_lora, lora_backward_input, lora_backward_weights
from rptrain.kernels.moe import Permutation, Scoring, choose, route, route_backward
from rptrain.kernels.moe_rows import combine, combine_backward, gather
from rptrain.kernels.reference.dense import wide
from rptrain.kernels.rms_norm import rms_norm, rms_norm_backward
from rptrain.kernels.rope import QKNorm, qk_norm_rope, qk_norm_rope_backward
from rptrain.kernels.swiglu import Clamp, swiglu, swiglu_backward


class Attention(torch.autograd.Function):
    """`Attention.apply(q, k, v, sinks, mb, window)`: out [T, H, C], for use with autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mb: MicroBatch, window: int | None
    ) -> Tensor:
        out, saved = attention(q, k, v, mb, window=window, sinks=sinks)
        ctx.save_for_backward(q, k, v, sinks, out)
        ctx.rest = saved, mb, window
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grad_outputs
        q, k, v, sinks, out = ctx.saved_tensors
        saved, mb, window = ctx.rest
        total = None if sinks is None else torch.zeros_like(sinks, dtype=saved.lse.dtype)
        grads = attention_backward(dout, q, k, v, out, saved, mb, window=window, sinks=sinks, grad_sinks=total)
        return *grads, total, None, None


class GroupedMM(torch.autograd.Function):
    """`grouped_mm` for autograd: x, w, ends, bias or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        ctx.biased = bias is not None
        return grouped_mm(x, w, ends, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
        x, w, ends = ctx.saved_tensors
        dy = grad_outputs[0].contiguous()
        dw = torch.zeros_like(w, dtype=wide(w.dtype))
        grouped_weight_grad(dw, x, dy, ends)
        db = None
        if ctx.biased:
            db = torch.zeros(w.shape[0], w.shape[2], dtype=wide(w.dtype), device=w.device)
            grouped_bias_grad(db, dy, ends)
            db = db.to(w.dtype)
        return grouped_mm(dy, w.mT, ends), dw.to(w.dtype), None, db


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


class AddLoRA(torch.autograd.Function):
    """`add_lora` for autograd, not in place: y, x, a, starts, scale, drop, then each b."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, a: Tensor, starts: Sequence[int], scale: float, drop: Dropout | None, *b: Tensor
    ) -> Tensor:
        y = y.clone()
        add_lora(y, x, a, b, starts, scale, drop)
        ctx.save_for_backward(x, a, *b)
        ctx.form = (starts, scale, drop)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, a, *b = ctx.saved_tensors
        (dy,) = grad_outputs
        dx = torch.zeros_like(x)
        grad_a, *grad_b = (torch.zeros_like(weight, dtype=wide(weight.dtype)) for weight in (a, *b))
        starts, scale, drop = ctx.form
        dh = lora_backward_input(dy, a, b, starts, scale, drop, dx)
        lora_backward_weights(dy, dh, x, a, starts, scale, drop, grad_a, grad_b)
        grads = (grad.to(a.dtype) for grad in (grad_a, *grad_b))
        return dy, dx, next(grads), None, None, None, *grads


class Route(torch.autograd.Function):
    """`choose` and `route` for autograd: logits, number of experts, scoring to weights and choice."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, active: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
        choice = choose(logits, active)
        ctx.save_for_backward(logits, choice)
        ctx.scoring = scoring
        ctx.mark_non_differentiable(choice)
        return route(logits, choice, scoring), choice

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits, choice = ctx.saved_tensors
        return route_backward(grad_outputs[0].contiguous(), logits, choice, ctx.scoring), None, None


class Gather(torch.autograd.Function):
    """`gather` for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, perm: Permutation) -> Tensor:
        ctx.perm = perm
        return gather(x, perm)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return combine(grad_outputs[0].contiguous(), ctx.perm), None


class Combine(torch.autograd.Function):
    """`combine` with weights for autograd: rows, weights, permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, perm: Permutation) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.perm = perm
        return combine(rows, perm, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        drows, dweights = combine_backward(grad_outputs[0].contiguous(), rows, ctx.perm, weights)
        return drows, dweights.to(weights.dtype), None


class RMSNorm(torch.autograd.Function):
    """`rms_norm` for autograd: x, weight, eps to y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        grad_weight = torch.zeros_like(weight, dtype=rstd.dtype)
        dx = rms_norm_backward(grad_outputs[0].contiguous(), x, weight, rstd, grad_weight)
        return dx, grad_weight.to(weight.dtype), None


class QKNormRope(torch.autograd.Function):
    """`qk_norm_rope` for autograd: qkv, cos, sin, kv_heads, size, both norms' weights or None, eps to q, k, v."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_heads: int,
        size: int,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm = None
        if q_weight is not None and k_weight is not None:
            norm = QKNorm(q_weight, k_weight, eps, len(q_weight) > size)
        ctx.whole = norm is not None and norm.whole
        q, k, v, rstd = qk_norm_rope(qkv.clone(), Rotation(cos, sin), kv_heads, size, norm)
        ctx.eps = eps
        ctx.save_for_backward(qkv, cos, sin, q_weight, k_weight, rstd)
        return q.clone(), k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = grad_outputs
        qkv, cos, sin, q_weight, k_weight, rstd = ctx.saved_tensors
        if rstd is None:
            return qk_norm_rope_backward(dq, dk, dv, qkv.clone(), Rotation(cos, sin)), *(None,) * 7
        norm = QKNorm(q_weight, k_weight, ctx.eps, ctx.whole)
        grads = torch.zeros_like(q_weight, dtype=rstd.dtype), torch.zeros_like(k_weight, dtype=rstd.dtype)
        dqkv = qk_norm_rope_backward(dq, dk, dv, qkv.clone(), Rotation(cos, sin), norm, rstd, grads)
        return dqkv, None, None, None, None, *(grad.to(q_weight.dtype) for grad in grads), None


class SwiGLU(torch.autograd.Function):
    """`swiglu` for autograd: gate_up, interleaved, clamp to the activation."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, interleaved: bool = False, clamp: Clamp | None = None) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.form = {"interleaved": interleaved, "clamp": clamp}
        return swiglu(gate_up, **ctx.form)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward(grad_outputs[0].contiguous(), gate_up, **ctx.form), None, None
