"""A product of all tokens with one weight: computation, with its bias and adapters, and costs."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.fp8 import Form, Maxima, Operand
from rptrain.kernels.fp8_products import product_workspace
from rptrain.kernels.linear import (
    accumulate_bias_grad,
    accumulate_weight_grad,
    linear,
    linear_add,
    linear_backward,
    linear_backward_input,
    plain,
)
from rptrain.models.layers.adapters import Adapters, Passed
from rptrain.models.params import Grads, Param, Params
from rptrain.schedule.costs import Work


class Source(Enum):
    """The operation before a product, which writes its input in FP8 where nothing else reads it."""

    NORM = auto()  # writes codes also in addition to its output
    ACTIVATION = auto()
    OTHER = auto()  # a product of its own quantizes what this leaves
    SHARED = auto()  # the one before another product, which counts the quantization of their input


class OutputGrad(NamedTuple):
    """The gradient of a product's output, for the gradients of its parameters."""

    dy: Tensor  # [T, outputs]
    adapters: Passed | None


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product with the weight `name` [outputs, inputs], and with the bias {name}_bias [outputs] if it has one.

    Its layer computes with it; adapters, FP8, planning and quantization of a frozen base read and replace it.
    """

    name: str
    inputs: int
    outputs: int
    mask: int  # the number, in its layer, of its adapters' dropout mask: a part of the seed
    bias: bool = False
    source: Source = Source.OTHER
    gradient_reads: int = 1  # of its output's gradient, to quantize it for the weight's gradient
    in_fp8: bool = False  # whether its weight is in FP8: models/transforms/fp8.py
    half_sums: bool = False  # gradients of float16 weights are summed in float16: models/transforms/half_sums.py
    adapters: Adapters | None = None  # models/transforms/lora.py

    def form(self, p: Params) -> Form:
        """The forms in which it reads its input; adapters read it in the model's type."""
        if isinstance(p[self.name], Tensor):
            return Form.PLAIN
        return Form.ROWS if self.adapters is None else Form.PLAIN | Form.ROWS

    def forward(self, p: Params, x: Tensor | Operand, mb: MicroBatch | None) -> Tensor:
        """The product of x [T, inputs], with bias and adapters, if any. No `mb`: without dropout."""
        bias, adapters = p.get(f"{self.name}_bias"), self.adapters
        if adapters is None:
            return linear(x, p[self.name], bias)
        y = linear(x, p[self.name], None if adapters.dora else bias)
        adapters.add(p, plain(x), y, mb)
        return y.add_(bias) if adapters.dora and bias is not None else y

    def add(
        self, p: Params, x: Tensor | Operand, residual: Tensor, mb: MicroBatch | None, scale: float, overwrite: bool
    ) -> Tensor:
        """`residual` plus the scaled product without a bias; `overwrite` allows it to overwrite the residual."""
        adapters = self.adapters
        if scale != 1 or (adapters is not None and adapters.dora):  # DoRA scales only the product
            return times_(self.forward(p, x, mb), scale).add_(residual)
        y = linear_add(x, p[self.name], residual, overwrite=overwrite)
        if adapters is not None:
            adapters.add(p, plain(x), y, mb)
        return y

    def backward(
        self,
        p: Params,
        g: Grads,
        dy: Tensor,
        x: Tensor | Operand,
        mb: MicroBatch,
        maxima: Maxima | None = None,
        total: Tensor | None = None,
    ) -> Tensor:
        """Returns the gradient of x; accumulates those of the parameters in `g`.

        `maxima`: see `linear_backward`; `total`: see `linear_backward_input`.
        """
        if self.adapters is None:
            accumulate_bias_grad(g.get(f"{self.name}_bias"), dy)
            weight, half_sums = p[self.name], self.half_sums
            return linear_backward(g.get(self.name), dy, x, weight, maxima, half_sums=half_sums, total=total)
        dx, of_output = self.backward_input(p, dy, mb, total)
        self.backward_weights(p, g, of_output, x, mb)
        return dx

    def backward_input(
        self, p: Params, dy: Tensor, mb: MicroBatch, total: Tensor | None = None
    ) -> tuple[Tensor, OutputGrad]:
        """The gradient of the input, and the argument of `backward_weights`."""
        if self.adapters is None:
            return linear_backward_input(dy, p[self.name], total), OutputGrad(dy, None)
        dx, passed = self.adapters.backward_input(p, dy, mb, total)
        return dx, OutputGrad(dy, passed)

    def backward_weights(
        self,
        p: Params,
        g: Grads,
        of_output: OutputGrad,
        x: Tensor | Operand,
        mb: MicroBatch,
        maxima: Maxima | None = None,
    ) -> None:
        """Accumulates the parameters' gradients in `g`; `maxima` of x: see `accumulate_weight_grad`."""
        dy, passed = of_output
        in_fp8 = not isinstance(p[self.name], Tensor)
        accumulate_weight_grad(g.get(self.name), dy, x, in_fp8=in_fp8, maxima=maxima, half_sums=self.half_sums)
        accumulate_bias_grad(g.get(f"{self.name}_bias"), dy)
        if self.adapters is not None and passed is not None:
            self.adapters.backward_weights(p, g, dy, passed, plain(x), mb)

    @property
    def reads_codes(self) -> bool:
        """Whether it reads its input in FP8 alone; adapters read it in the model's type."""
        return self.in_fp8 and self.adapters is None

    def owns(self, param: Param) -> bool:
        """Whether `gradient_work` is that of the parameter."""
        return param.name == self.name

    def work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The work of forward and of backward, without the adapters'."""
        operations = 2.0 * tokens * self.inputs * self.outputs
        if self.in_fp8:
            back = _row_bytes(self.outputs, itemsize) + self._gradient_bytes(itemsize)
            forward = Work(fp8=operations, quantization=tokens * self._input_bytes(itemsize))
            backward = Work(fp8=2 * operations, quantization=tokens * back)
        else:
            forward, backward = Work(matmul=operations), Work(matmul=2 * operations)
        if self.bias:
            backward += Work(elementwise={"biases, backward": float(tokens * itemsize * self.outputs)})
        return forward, backward

    def gradient_work(self, param: Param, tokens: int, itemsize: int) -> Work:
        """The part of backward's work that is for the weight's gradient."""
        operations = product_gradient(param, tokens).matmul
        if self.in_fp8:
            return Work(fp8=operations, quantization=tokens * self._gradient_bytes(itemsize))
        return Work(matmul=operations)

    def fp8_workspace(self, tokens: int, *, fused: bool) -> int:
        """Bytes that the product in FP8 needs at once."""
        return product_workspace(tokens, self.inputs, self.outputs, fused=fused) if self.in_fp8 else 0

    @property
    def dora_workspace(self) -> int:
        """Bytes that the norms of a weight in FP8 need with DoRA."""
        return self.adapters.dequantized_bytes if self.in_fp8 and self.adapters is not None else 0

    def _input_bytes(self, itemsize: int) -> int:
        """Bytes per token to quantize the input, beyond what the operation that computes it moves."""
        if self.source is Source.SHARED:
            return 0
        separately = self.source is Source.OTHER or (self.source is Source.ACTIVATION and not self.reads_codes)
        if separately:
            return _row_bytes(self.inputs, itemsize)
        return self.inputs * (1 - itemsize if self.reads_codes else 1)

    def _gradient_bytes(self, itemsize: int) -> int:
        """Bytes per token for the operands of the weight's gradient.

        The output's gradient: columns are quantized together with rows. The input: codes are transposed; those of an
        activation are written transposed.
        """
        of_output = self.gradient_reads * itemsize + 1
        of_input = itemsize + 1 if self.source is Source.ACTIVATION else 2
        return of_output * self.outputs + of_input * self.inputs


def product_gradient(param: Param, tokens: int) -> Work:
    """The gradient work of a weight [out, in] that is multiplied with every token; none for vectors."""
    return Work(matmul=2.0 * tokens * param.numel if len(param.shape) == 2 else 0.0)


def kept(x: Operand) -> Operand:
    """The part of a product's input that backward reads: a weight with adapters gets no gradient."""
    return x if x.plain is None else x._replace(rows=None)


def times(x: Tensor, scale: float) -> Tensor:
    """x times a factor, in its type."""
    return x if scale == 1 else x * scale


def times_(x: Tensor, scale: float) -> Tensor:
    """`times` in place."""
    return x if scale == 1 else x.mul_(scale)


def _row_bytes(columns: int, itemsize: int) -> int:
    """Bytes read and written to quantize a row."""
    return columns * (itemsize + 1)
