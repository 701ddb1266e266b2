"""A product of each routed row with its expert's weight: computation, with biases and adapters, and costs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import fp8, grouped_fp8
from rptrain.kernels.grouped import grouped_mm, grouped_weight_grad
from rptrain.kernels.moe import Permutation
from rptrain.kernels.moe_rows import gather
from rptrain.models.layers.expert_adapters import ExpertAdapters
from rptrain.models.params import Grads, Param, Params
from rptrain.schedule.costs import Work


class RowsGrad(NamedTuple):
    """The gradient of the rows' outputs, for the gradients of the parameters."""

    dy: Tensor  # [N, outputs]
    dh: Tensor | None  # [N, rank], of the product with the adapters' A


@dataclass(frozen=True, kw_only=True)
class ExpertProduct:
    """A product with the experts' weights `name`, and with {name}_bias [E, outputs] if it has one.

    Weights are stacked [E * outputs, inputs], or as GPT-OSS stores them [E, inputs, outputs]. Rows [N, inputs] are
    sorted by expert, and those of an expert end at `ends`.
    """

    name: str
    inputs: int
    outputs: int
    experts: int
    active: int  # experts per token
    bias: bool = False
    gathers: bool = False  # whether its rows are tokens, gathered by expert
    freed: int = 0  # columns per row that backward frees before this product
    in_fp8: bool = False  # whether its weights are in FP8: models/transforms/fp8.py
    adapters: ExpertAdapters | None = None  # models/transforms/lora.py

    def gathered(self, p: Params, normed_TD: Tensor, perm: Permutation) -> Tensor | fp8.Rows:
        """The tokens' rows by expert; their codes in FP8, unless adapters or scales by expert need the values."""
        w = p[self.name]
        if isinstance(w, Tensor) or w.by_input or self.adapters is not None:
            return gather(normed_TD, perm)
        return grouped_fp8.gather_codes(fp8.quantize_rows(normed_TD), perm)

    def forward(self, p: Params, x: Tensor | fp8.Rows, ends: Tensor, dtype: torch.dtype) -> Tensor:
        """The product in the model's type `dtype`, with bias and adapters, if any."""
        w, bias = p[self.name], p.get(f"{self.name}_bias")
        if isinstance(w, fp8.FP8Weight):
            y = grouped_fp8.grouped_mm(x, w, ends, bias, dtype)
        else:
            assert isinstance(x, Tensor)
            y = grouped_mm(x, self.whole(w), ends, bias)
        if self.adapters is not None:
            assert isinstance(x, Tensor)
            self.adapters.add(p, x, y, ends)
        return y

    def backward_input(self, p: Params, dy: Tensor, ends: Tensor) -> tuple[Tensor, RowsGrad]:
        """The gradient of the input, and the argument of `backward_weights`."""
        w = p[self.name]
        if isinstance(w, fp8.FP8Weight):
            dx = grouped_fp8.grouped_mm_transposed(dy, w, ends)
        else:
            dx = grouped_mm(dy, self.whole(w).mT, ends)
        return dx, RowsGrad(dy, self.adapters.backward_input(p, dy, dx, ends) if self.adapters is not None else None)

    def backward_weights(self, p: Params, g: Grads, of_rows: RowsGrad, x: Tensor | fp8.Rows, ends: Tensor) -> None:
        """Accumulates the gradients of weights and adapters in `g`."""
        dy, dh = of_rows
        if self.name in g and isinstance(w := p[self.name], fp8.FP8Weight):
            grouped_fp8.grouped_weight_grad(g[self.name].view(w.rows.codes.shape), x, dy, ends, by_input=w.by_input)
        elif self.name in g:
            assert isinstance(x, Tensor)
            grouped_weight_grad(self.whole(g[self.name]), x, dy, ends)
        if self.adapters is not None and dh is not None:
            assert isinstance(x, Tensor)
            self.adapters.backward_weights(p, g, dy, dh, x, ends)

    def whole(self, stored: Tensor) -> Tensor:
        """[E, in, out]: as GPT-OSS stores the experts, or a view of theirs stacked, [E * out, in]."""
        return stored if stored.dim() == 3 else stored.view(self.experts, -1, stored.shape[1]).mT

    @property
    def gathers_codes(self) -> bool:
        """Whether tokens are quantized before their rows are gathered: see `gathered`. GPT-OSS counts as without."""
        return self.gathers and self.in_fp8 and not self.bias and self.adapters is None

    def owns(self, param: Param) -> bool:
        """Whether `gradient_work` is that of the parameter: of the weights, biases and adapters."""
        return param.name == self.name or param.name.startswith(f"{self.name}_")

    def work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The work of forward and of backward, without the adapters'; in FP8 operands are quantized for each product.

        Traffic: the weights of experts that tokens may reach, and the gradient of biases.
        """
        rows = tokens * self.active
        operations = 2.0 * rows * self.inputs * self.outputs
        touched = min(self.experts, tokens * self.active)
        weights = {"experts' weights": touched * self.inputs * self.outputs * (1 if self.in_fp8 else itemsize)}
        biases = {"biases, backward": tokens * itemsize * self.active * self.outputs} if self.bias else {}
        if not self.in_fp8:
            return (
                Work(grouped=operations, elementwise=weights),
                Work(grouped=2 * operations, elementwise=weights | biases),
            )
        forward = Work(grouped_fp8=operations, quantization=self._input_bytes(tokens, itemsize), elementwise=weights)
        backward = Work(
            grouped_fp8=operations, quantization=rows * self.outputs * (itemsize + 1), elementwise=weights | biases
        )
        return forward, backward + self._weights_work(tokens, itemsize)

    def gradient_work(self, param: Param, tokens: int, itemsize: int) -> Work:
        """The part of backward's work that is for a parameter's gradient; biases need no products."""
        if param.name != self.name:
            return Work()
        if self.in_fp8:
            return self._weights_work(tokens, itemsize)
        return Work(grouped=2.0 * tokens * param.numel * self.active / self.experts)

    def fp8_workspace(self, tokens: int, itemsize: int, *, fused: bool) -> int:
        """Bytes that the product in FP8 needs in addition to those between operations."""
        if not self.in_fp8:
            return 0
        rows = tokens * self.active
        sizes = rows, self.experts, self.inputs, self.outputs
        return grouped_fp8.workspace(*sizes, largest=tokens, fused=fused) - rows * self.freed * itemsize

    def _weights_work(self, tokens: int, itemsize: int) -> Work:
        """The weights' gradient in FP8: codes of inputs are transposed, gradients of outputs read twice."""
        rows = tokens * self.active
        moved = self._input_bytes(tokens, itemsize) + rows * (2 * self.inputs + self.outputs * (2 * itemsize + 1))
        return Work(grouped_fp8=2.0 * rows * self.inputs * self.outputs, quantization=moved)

    def _input_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes read and written to quantize the input."""
        return tokens * (1 if self.gathers_codes else self.active) * self.inputs * (itemsize + 1)
