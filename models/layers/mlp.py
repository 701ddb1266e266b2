"""The layers of dense models: the decoder block, and the head with its loss.

They compute forward and backward explicitly (models/layer.py defines the contract and the shape suffixes). Between
operations values are rounded to the model's dtype where Hugging Face's modelling code rounds them, except that the
MLP's product and its residual are added before rounding. Backward reuses saved tensors: the gradients of the
products qkv and gate_up overwrite them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.fp8 import Maxima, Operand
from rptrain.kernels.swiglu import swiglu_backward, swiglu_backward_with_maxima, swiglu_operand
from rptrain.models.layers.attention import AttentionBlock
from rptrain.models.params import Grads, Params
from rptrain.schedule.costs import Work, scaled


class MLPSaved(NamedTuple):
    x: Tensor  # [T, D]
    rstd: Tensor | None  # [T], with the norm before
    normed: Operand  # [T, D]
    gate_up: Tensor  # [T, 2I]; backward computes its SwiGLU again
    product: Tensor | None  # [T, D], with the norm after


@dataclass(frozen=True, kw_only=True)
class Block(AttentionBlock):
    """A decoder block whose MLP is SwiGLU.

    Its parameters: gate_up [2I, D], down [D, I]; with `pre_norms` post_norm [D], with `post_norms` mlp_norm [D].
    """

    def mlp(self, p: Params, product: Tensor, x_TD: Tensor, mb: MicroBatch | None) -> MLPSaved:
        h_TD, normed, rstd = self.input_norm(p, "post_norm", product, x_TD, self.form(p, "gate_up"))
        gate_up = self.product(p, "gate_up", normed, mb)
        down = self._down(p, gate_up, mb) if self.post_norms else None
        return MLPSaved(h_TD, rstd, self.kept(normed), gate_up, down)

    def _down(self, p: Params, gate_up: Tensor, mb: MicroBatch | None) -> Tensor:
        return self.product(p, "down", swiglu_operand(gate_up, self.form(p, "down")), mb)

    def mlp_output(self, p: Params, saved: MLPSaved, mb: MicroBatch | None, *, overwrite: bool = False) -> Tensor:
        if saved.product is not None:
            return self.output_norm(p, "mlp_norm", saved.product)[0].add_(saved.x)
        activation = swiglu_operand(saved.gate_up, self.form(p, "down"))
        return self.product_add(p, "down", activation, saved.x, mb, overwrite=overwrite)

    def mlp_backward(self, p: Params, g: Grads, saved: MLPSaved, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        output = None if saved.product is None else self.output_norm(p, "mlp_norm", saved.product)[1]
        dproduct = self.output_norm_backward(p, g, "mlp_norm", dy_TD, output)
        del output
        activation, passed = self.backward_input(p, "down", dproduct, mb)  # its gradient, until it is overwritten
        dgate_up, maxima, of_activation = self._swiglu_backward(p, g, saved, activation)
        self.backward_weights(p, g, "down", dproduct, passed, activation, mb, of_activation)
        del dproduct
        dnormed = self.product_backward(p, g, "gate_up", dgate_up, saved.normed, mb, maxima)
        return self.input_norm_backward(p, g, "post_norm", dnormed, saved.x, saved.rstd, dy_TD)

    def _swiglu_backward(
        self, p: Params, g: Grads, saved: MLPSaved, dy: Tensor
    ) -> tuple[Tensor, Maxima | None, Maxima | None]:
        """The gradient of gate_up, written over it, and its maxima; `dy` becomes the activation, with its maxima."""
        rows = saved.normed.rows
        if rows is None or "gate_up" not in g:
            return swiglu_backward(dy, saved.gate_up, saved.gate_up, dy), None, None
        dgate_up, maxima, _, of_activation = swiglu_backward_with_maxima(
            dy, saved.gate_up, p["gate_up"].rows.scales, rows.scales
        )
        return dgate_up, maxima, of_activation

    @property
    def product_sizes(self) -> dict[str, tuple[int, int]]:
        mlp = {"gate_up": (self.hidden, 2 * self.intermediate), "down": (self.intermediate, self.hidden)}
        return super().product_sizes | mlp

    def mlp_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        forward = {"activation": 3 * self.intermediate, "sum": 3 * self.hidden}
        # the activation's backward writes the activation again
        backward = {"activation, backward": 6 * self.intermediate, "norm and sum, backward": 4 * self.hidden}
        return (
            Work(elementwise=scaled(forward, tokens * itemsize)),
            Work(elementwise=scaled(backward, tokens * itemsize)),
        )

    def mlp_kept(self, tokens: int, itemsize: int) -> int:
        elements = (2 if self.post_norms else 1) * self.hidden + 2 * self.intermediate
        statistics = max(itemsize, 4) if self.pre_norms else 0
        return tokens * (itemsize * elements + self.normed_bytes("gate_up", itemsize) + statistics)

    def mlp_workspace(self, itemsize: int) -> tuple[int, int]:
        # the activation, gradients on both sides of the norm; SwiGLU with the activation again, products, a norm
        wide = max(itemsize, 4)
        inside = max(3 * wide * self.intermediate + itemsize * self.intermediate, 5 * wide * self.hidden)
        return itemsize * (2 * self.hidden + self.intermediate), inside
