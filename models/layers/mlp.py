"""Gated MLPs: the feed-forward part of dense blocks, and the one that all tokens go through beside experts.

Backward reuses saved tensors: the gradient of the product gate_up overwrites it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from torch import Tensor

from rptrain.kernels import fp8
from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.fp8 import Form, Maxima, Operand
from rptrain.kernels.moe_rows import token_weight_grad
from rptrain.kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_with_maxima, swiglu_operand
from rptrain.models.layers.expert_product import ExpertProduct
from rptrain.models.layers.product import Product, Source, kept, times_
from rptrain.models.params import Grads, Params
from rptrain.schedule.costs import Work, scaled
from rptrain.schedule.roofline import Sizes


class MLPSaved(NamedTuple):
    normed: Operand  # [T, D], the input
    gate_up: Tensor  # [T, 2I]; backward computes its SwiGLU again


@dataclass(frozen=True, kw_only=True)
class MLP:
    """SwiGLU between two products: a FeedForward (models/layers/block.py).

    Parameters: gate_up [2I, D], down [D, I]. It keeps its input and gate_up.
    """

    gate_up: Product
    down: Product

    @classmethod
    def of(cls, hidden: int, intermediate: int) -> Self:
        gate_up: dict[str, Any] = {"inputs": hidden, "outputs": 2 * intermediate}
        down: dict[str, Any] = {"inputs": intermediate, "outputs": hidden}
        return cls(
            # SwiGLU's backward finds the maxima of the gradient of gate_up; the rows and columns of that of `down` are
            # quantized separately
            gate_up=Product(name="gate_up", **gate_up, mask=2, source=Source.NORM, gradient_reads=0),
            down=Product(name="down", **down, mask=3, source=Source.ACTIVATION, gradient_reads=2),
        )

    @property
    def router(self) -> None:
        return None

    def with_balance(self, coefficient: float) -> Self:
        return self

    @property
    def products(self) -> tuple[Product, ...]:
        return self.gate_up, self.down

    @property
    def expert_products(self) -> tuple[ExpertProduct, ...]:
        return ()

    def with_products(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, gate_up=change(self.gate_up), down=change(self.down))

    def with_half_sums(self) -> Self:
        return self.with_products(lambda product: replace(product, half_sums=True))

    def form(self, p: Params) -> Form:
        return self.gate_up.form(p)

    def inner(self, p: Params, x: Operand, mb: MicroBatch | None) -> MLPSaved:
        return MLPSaved(kept(x), self.gate_up.forward(p, x, mb))

    def output(self, p: Params, saved: MLPSaved, mb: MicroBatch | None) -> Tensor:
        return self.down.forward(p, swiglu_operand(saved.gate_up, self.down.form(p)), mb)

    def add(
        self, p: Params, saved: MLPSaved, residual: Tensor, mb: MicroBatch | None, scale: float, overwrite: bool
    ) -> Tensor:
        activation = swiglu_operand(saved.gate_up, self.down.form(p))
        return self.down.add(p, activation, residual, mb, scale, overwrite)

    def backward(self, p: Params, g: Grads, saved: MLPSaved, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        activation, of_output = self.down.backward_input(p, dy_TD, mb)  # its gradient, until it is overwritten
        dgate_up, maxima, of_activation = self._swiglu_backward(p, g, saved, activation)
        self.down.backward_weights(p, g, of_output, activation, mb, of_activation)
        del dy_TD, of_output
        return self.gate_up.backward(p, g, dgate_up, saved.normed, mb, maxima)

    def _swiglu_backward(
        self, p: Params, g: Grads, saved: MLPSaved, dy: Tensor
    ) -> tuple[Tensor, Maxima | None, Maxima | None]:
        """The gradient of gate_up, written over it, and its maxima; `dy` becomes the activation, with its maxima."""
        rows = saved.normed.rows
        if rows is None or self.gate_up.name not in g:
            return swiglu_backward(dy, saved.gate_up, saved.gate_up, dy), None, None
        dgate_up, maxima, _, of_activation = swiglu_backward_with_maxima(
            dy, saved.gate_up, p[self.gate_up.name].rows.scales, rows.scales
        )
        return dgate_up, maxima, of_activation

    @property
    def intermediate(self) -> int:
        return self.down.inputs

    @property
    def reads_codes(self) -> bool:
        return self.gate_up.reads_codes

    def work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        # the activation's backward writes the activation again
        forward, backward = {"activation": 3 * self.intermediate}, {"activation, backward": 6 * self.intermediate}
        return (
            Work(elementwise=scaled(forward, tokens * itemsize)),
            Work(elementwise=scaled(backward, tokens * itemsize)),
        )

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        return tokens * itemsize * 2 * self.intermediate

    def workspace(self, itemsize: int) -> tuple[int, int]:
        # the activation and the gradient of the input, then those of both sides of the norm; SwiGLU, products, a norm
        hidden, wide = self.gate_up.inputs, max(itemsize, 4)
        inside = max(3 * wide * self.intermediate + itemsize * self.intermediate, 5 * wide * hidden)
        return itemsize * (hidden + max(self.intermediate, hidden)), inside

    def sized(self, mixer: Sizes) -> Sizes:
        return replace(mixer, intermediate=self.intermediate)


class SharedSaved(NamedTuple):
    normed: Operand  # [T, D], the input of gate_up
    gate_up: Tensor  # [T, 2S]; backward computes its SwiGLU again
    share: Tensor | None  # [T, 1], what the output is multiplied by


@dataclass(frozen=True, kw_only=True)
class SharedMLP:
    """A gated MLP of `intermediate` columns S that all tokens go through beside experts.

    With `gate`, each token's output is multiplied by the sigmoid of that product, its share (Qwen3-Next, Qwen3.5).
    Parameters: shared_gate_up [2S, D], shared_down [D, S]; with `gate` shared_gate [1, D]. It keeps its input, if in
    FP8, shared_gate_up and the shares.
    """

    gate_up: Product
    down: Product
    gate: Product | None = None

    @classmethod
    def of(cls, hidden: int, intermediate: int, *, gated: bool = False) -> Self:
        gate_up: dict[str, Any] = {"inputs": hidden, "outputs": 2 * intermediate}
        down: dict[str, Any] = {"inputs": intermediate, "outputs": hidden}
        return cls(
            gate_up=Product(name="shared_gate_up", **gate_up, mask=4),
            down=Product(name="shared_down", **down, mask=5, source=Source.ACTIVATION),
            gate=Product(name="shared_gate", inputs=hidden, outputs=1, mask=9) if gated else None,
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return (self.gate_up, self.down) if self.gate is None else (self.gate_up, self.down, self.gate)

    def with_products(self, change: Callable[[Any], Any]) -> Self:
        gate = self.gate and change(self.gate)
        return replace(self, gate_up=change(self.gate_up), down=change(self.down), gate=gate)

    @property
    def intermediate(self) -> int:
        return self.down.inputs

    @property
    def gated(self) -> bool:
        return self.gate is not None

    def inner(self, p: Params, x_TD: Tensor, mb: MicroBatch | None) -> SharedSaved:
        x = fp8.operand(x_TD, self.gate_up.form(p))
        share = None if self.gate is None else self.gate.forward(p, x_TD, mb).sigmoid_()
        return SharedSaved(kept(x), self.gate_up.forward(p, x, mb), share)

    def add(self, p: Params, saved: SharedSaved, total_TD: Tensor, mb: MicroBatch | None, scale: float) -> Tensor:
        """`total_TD`, which is overwritten, plus the scaled output."""
        activation = swiglu_operand(saved.gate_up, self.down.form(p))
        if saved.share is None:
            return self.down.add(p, activation, total_TD, mb, scale, overwrite=True)
        return total_TD.add_(times_(self.down.forward(p, activation, mb).mul_(saved.share), scale))

    def backward(self, p: Params, g: Grads, saved: SharedSaved, x_TD: Tensor, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        """The gradient of the input `x_TD`; overwrites gate_up."""
        activation, of_output = self.down.backward_input(p, dy_TD, mb)  # its gradient, until it is overwritten
        if self.gate is None or saved.share is None:
            dgate_up, dshare = swiglu_backward(activation, saved.gate_up, saved.gate_up, activation), None
        else:
            dactivation, activation = activation, swiglu(saved.gate_up)
            dshare = token_weight_grad(dactivation, activation, saved.share)
            dgate_up = swiglu_backward(dactivation, saved.gate_up, saved.gate_up)
            del dactivation
        self.down.backward_weights(p, g, of_output, activation, mb)
        del activation, of_output
        dx = self.gate_up.backward(p, g, dgate_up, saved.normed, mb)
        if self.gate is not None and saved.share is not None and dshare is not None:
            share = saved.share.to(dshare.dtype)
            dlogits = (dshare * share * (1 - share)).to(x_TD.dtype)
            dx += self.gate.backward(p, g, dlogits, x_TD, mb)
        return dx

    @property
    def backward_columns(self) -> int:
        """Columns per token that backward needs at once, beside what is kept."""
        hidden = self.gate_up.inputs
        return hidden + max(2 * self.intermediate, hidden * self.gated)
