"""The attention of a decoder block, forward and backward; subclasses add the MLP."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rptrain.kernels import attention as attn
from rptrain.kernels import fp8
from rptrain.kernels.batch import MicroBatch, Rotation
from rptrain.kernels.fp8 import Form, Maxima, Operand
from rptrain.kernels.half import Heads
from rptrain.kernels.linear import (
    accumulate_bias_grad,
    accumulate_weight_grad,
    linear,
    linear_add,
    linear_backward,
    linear_backward_input,
    plain,
)
from rptrain.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_operand
from rptrain.kernels.rope import QKNorm, qk_norm_rope, qk_norm_rope_backward
from rptrain.models.layers.adapters import Adapters, Passed
from rptrain.models.layers.block import BlockShape
from rptrain.models.params import Grads, Params

Attend = Callable[[Any, Any, Any], tuple[Tensor, Any]]  # q, k, v to out, and what backward needs


class OutputSaved(NamedTuple):
    """An output before its norm."""

    x: Tensor  # [T, D]
    rstd: Tensor  # [T]


class AttentionSaved(NamedTuple):
    x: Tensor  # [T, D]
    rstd: Tensor | None  # [T], with the norm before
    normed: Operand  # [T, D]
    qkv: Tensor  # [T, (H + 2K) C]; v is in its memory, and without q/k norm q and k are too
    qk_rstd: Tensor | None  # [T, H + K], with q/k norm
    q: Heads  # [T, H, C], rotated; k, v [T, K, C]
    k: Heads
    v: Heads
    out: Tensor  # [T, H, C]
    attended: Operand  # [T, H C], out as the output projection reads it
    attention: Any  # attn.Saved
    output: OutputSaved | None  # with the norm after


@dataclass(frozen=True, kw_only=True)
class AttentionBlock(BlockShape):
    """A decoder block: grouped-query attention with rotary positions, then an MLP, with norms before or after each.

    Parameters of the attention: qkv [(H + 2K) C, D], o [D, H C]; with `pre_norms` input_norm [D], with `post_norms`
    attention_norm [D]; with `qk_norm` q_norm and k_norm, [C] each, or with `whole_qk_norm` [H C] and [K C]; if enabled
    qkv_bias [(H + 2K) C], o_bias [D] and sinks [H].
    """

    eps: float

    @abstractmethod
    def mlp(self, p: Params, product: Tensor, x_TD: Tensor, mb: MicroBatch | None) -> Any:
        """The tensors that the MLP's backward needs, from attention's output and the block's input."""

    @abstractmethod
    def mlp_output(self, p: Params, saved: Any, mb: MicroBatch | None, *, overwrite: bool = False) -> Tensor:
        """The block's output from the saved tensors, which `overwrite` allows to overwrite."""

    @abstractmethod
    def mlp_backward(self, p: Params, g: Grads, saved: Any, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        """Accumulates the MLP's gradients in `g`; returns the gradient of the sum of output and input."""

    def forward(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor:
        x_TD = times(x_TD, self.input_scale)
        product = self._attention(p, x_TD, mb.rotations, self._attend(p, mb), mb)[0]
        return self.mlp_output(p, self.mlp(p, product, x_TD, mb), mb, overwrite=True)

    def step(self, p: Params, x_TD: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        """Forward with the caller's attention over the rotated q, k and v, for decoding with a cache.

        There is no dropout, and q, k and v keep the model's type.
        """
        x_TD = times(x_TD, self.input_scale)
        product = self._attention(p, x_TD, rotations, attend, None)[0]
        return self.mlp_output(p, self.mlp(p, product, x_TD, None), None, overwrite=True)

    def forward_saved(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[Tensor, tuple[AttentionSaved, Any]]:
        attention, mlp = self.recompute(p, x_TD, mb)
        return self.mlp_output(p, mlp, mb), (attention, mlp)

    def recompute(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[AttentionSaved, Any]:
        x_TD = times(x_TD, self.input_scale)
        product, attention = self._attention(p, x_TD, mb.rotations, self._attend(p, mb), mb)
        return attention, self.mlp(p, product, x_TD, mb)

    def backward(self, p: Params, g: Grads, saved: tuple[AttentionSaved, Any], dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        attention, mlp = saved
        dx_TD = self._attention_backward(p, g, attention, self.mlp_backward(p, g, mlp, dy_TD, mb), mb)
        return times_(dx_TD, self.input_scale)

    def _attend(self, p: Params, mb: MicroBatch) -> Attend:
        extras = {"window": self.window, "sinks": p.get("sinks"), "scale": self.scale}
        return lambda q, k, v: attn.attention(q, k, v, mb, **extras)

    def input_norm(
        self, p: Params, name: str, x: Tensor, residual: Tensor | None, form: Form
    ) -> tuple[Tensor, Operand, Tensor | None]:
        """x plus the residual, if any; its norm `name`, or with no norms before itself, in `form`; 1 / rms."""
        if self.pre_norms:
            return rms_norm_operand(x, residual, p[name], self.eps, form)
        total = x if residual is None else x + residual
        return total, fp8.operand(total, form), None

    def input_norm_backward(
        self, p: Params, g: Grads, name: str, dnormed: Tensor, x: Tensor, rstd: Tensor | None, dresidual: Tensor
    ) -> Tensor:
        """The gradient of the sum x, `dresidual` included; may be written over `dnormed`."""
        if rstd is None:
            return dnormed.add_(dresidual)
        return rms_norm_backward(dnormed, x, p[name], rstd, g.get(name), dresidual)

    def output_norm(self, p: Params, name: str, x: Tensor) -> tuple[Tensor, OutputSaved | None]:
        """The norm `name` of an output, or with no norms after itself; both scaled, and maybe in place."""
        if not self.post_norms:
            return times_(x, self.output_scale), None
        y, rstd = rms_norm(x, p[name], self.eps)
        return times_(y, self.output_scale), OutputSaved(x, rstd)

    def output_norm_backward(self, p: Params, g: Grads, name: str, dy: Tensor, saved: OutputSaved | None) -> Tensor:
        """The gradient of an output; `dy` itself if it passes unchanged."""
        dy = times(dy, self.output_scale)
        return dy if saved is None else rms_norm_backward(dy, saved.x, p[name], saved.rstd, g.get(name))

    def form(self, p: Params, name: str) -> Form:
        """The forms in which product `name` reads its input; adapters read it in the model's type."""
        if isinstance(p[name], Tensor):
            return Form.PLAIN
        return Form.ROWS if self._adapters(name) is None else Form.PLAIN | Form.ROWS

    def kept(self, x: Operand) -> Operand:
        """The part of a product's input that backward reads: a weight with adapters gets no gradient."""
        return x if x.plain is None else x._replace(rows=None)

    def product(self, p: Params, name: str, x: Tensor | Operand, mb: MicroBatch | None) -> Tensor:
        """The product of x with the weight `name`, with its bias and adapters, if any."""
        bias, adapters = p.get(f"{name}_bias"), self._adapters(name)
        if adapters is None:
            return linear(x, p[name], bias)
        y = linear(x, p[name], None if adapters.dora else bias)
        adapters.add(p, plain(x), y, self.units[0], mb)
        return y.add_(bias) if adapters.dora and bias is not None else y

    def product_backward(
        self,
        p: Params,
        g: Grads,
        name: str,
        dy: Tensor,
        x: Tensor | Operand,
        mb: MicroBatch,
        maxima: Maxima | None = None,
    ) -> Tensor:
        """Returns the gradient of x; accumulates those of the parameters in `g`. `maxima`: see `linear_backward`."""
        if self._adapters(name) is None:
            accumulate_bias_grad(g.get(f"{name}_bias"), dy)
            return linear_backward(g.get(name), dy, x, p[name], maxima, half_sums=self.half_sums)
        dx, passed = self.backward_input(p, name, dy, mb)
        self.backward_weights(p, g, name, dy, passed, x, mb)
        return dx

    def product_add(
        self, p: Params, name: str, x: Tensor | Operand, residual: Tensor, mb: MicroBatch | None, *, overwrite: bool
    ) -> Tensor:
        """`residual` plus the scaled product without a bias; `overwrite` allows it to overwrite the residual."""
        adapters = self._adapters(name)
        if self.output_scale != 1 or (adapters is not None and adapters.dora):  # DoRA scales only the product
            return times_(self.product(p, name, x, mb), self.output_scale).add_(residual)
        y = linear_add(x, p[name], residual, overwrite=overwrite)
        if adapters is not None:
            adapters.add(p, plain(x), y, self.units[0], mb)
        return y

    def backward_input(self, p: Params, name: str, dy: Tensor, mb: MicroBatch) -> tuple[Tensor, Passed | None]:
        """The gradient of a product's input and, with adapters, the input of `backward_weights`."""
        adapters = self._adapters(name)
        if adapters is None:
            return linear_backward_input(dy, p[name]), None
        return adapters.backward_input(p, dy, self.units[0], mb)

    def backward_weights(
        self,
        p: Params,
        g: Grads,
        name: str,
        dy: Tensor,
        passed: Passed | None,
        x: Tensor | Operand,
        mb: MicroBatch,
        maxima: Maxima | None = None,
    ) -> None:
        """Accumulates the gradients of a product's parameters in `g`; `maxima` of x: see `accumulate_weight_grad`."""
        in_fp8 = not isinstance(p[name], Tensor)
        accumulate_weight_grad(g.get(name), dy, x, in_fp8=in_fp8, maxima=maxima, half_sums=self.half_sums)
        accumulate_bias_grad(g.get(f"{name}_bias"), dy)
        adapters = self._adapters(name)
        if adapters and passed:
            adapters.backward_weights(p, g, dy, passed, plain(x), self.units[0], mb)

    def _adapters(self, name: str) -> Adapters | None:
        return next((each for each in self.adapters if isinstance(each, Adapters) and each.name == name), None)

    def _attention(
        self, p: Params, x_TD: Tensor, rotations: Sequence[Rotation], attend: Attend, mb: MicroBatch | None
    ) -> tuple[Tensor, AttentionSaved]:
        """Attention's output [T, D], before the residual is added. No `mb`: a step of decoding."""
        _, normed, rstd = self.input_norm(p, "input_norm", x_TD, None, self.form(p, "qkv"))
        qkv = self.product(p, "qkv", normed, mb)
        half_sums = self.half_sums and mb is not None
        form = self._rotation(rotations), self.kv_heads, self.head_size, self._norms(p)
        q, k, v, qk_rstd = qk_norm_rope(qkv, *form, half_sums=half_sums)
        out, attention = attend(q, k, v)
        attended = fp8.operand(out.flatten(1), self.form(p, "o"))
        product, output = self.output_norm(p, "attention_norm", self.product(p, "o", attended, mb))
        saved = AttentionSaved(
            x_TD, rstd, self.kept(normed), qkv, qk_rstd, q, k, v, out, self.kept(attended), attention, output
        )
        return product, saved

    def _attention_backward(self, p: Params, g: Grads, saved: AttentionSaved, dh_TD: Tensor, mb: MicroBatch) -> Tensor:
        dqkv = qk_norm_rope_backward(
            *self._attend_backward(p, g, dh_TD, saved, mb),
            saved.qkv,
            self._rotation(mb.rotations),
            self._norms(p),
            saved.qk_rstd,
            (g.get("q_norm"), g.get("k_norm")) if self.qk_norm else None,
        )
        dnormed = self.product_backward(p, g, "qkv", dqkv, saved.normed, mb)
        return self.input_norm_backward(p, g, "input_norm", dnormed, saved.x, saved.rstd, dh_TD)

    def _attend_backward(
        self, p: Params, g: Grads, dh_TD: Tensor, saved: AttentionSaved, mb: MicroBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        dproduct = self.output_norm_backward(p, g, "attention_norm", dh_TD, saved.output)
        dout = self.product_backward(p, g, "o", dproduct, saved.attended, mb)
        del dproduct
        return attn.attention_backward(
            dout.view_as(saved.out),
            saved.q,
            saved.k,
            saved.v,
            saved.out,
            saved.attention,
            mb,
            window=self.window,
            sinks=p.get("sinks"),
            grad_sinks=g.get("sinks"),
            scale=self.scale,
        )

    def _rotation(self, rotations: Sequence[Rotation]) -> Rotation | None:
        return None if self.rotary is None else rotations[self.rotary]

    def _norms(self, p: Params) -> QKNorm | None:
        return QKNorm(p["q_norm"], p["k_norm"], self.eps, self.whole_qk_norm) if self.qk_norm else None


def times(x: Tensor, scale: float) -> Tensor:
    """x times a factor, in its type."""
    return x if scale == 1 else x * scale


def times_(x: Tensor, scale: float) -> Tensor:
    """`times` in place."""
    return x if scale == 1 else x.mul_(scale)
