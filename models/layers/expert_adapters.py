"""Low-rank adapters of experts' products: computation and costs."""

from dataclasses import dataclass

from torch import Tensor

from rptrain.kernels.grouped_lora import (
    add_grouped_lora,
    add_to_weights,
    grouped_lora_backward_input,
    grouped_lora_backward_weights,
)
from rptrain.models.layers.adapters import Factors
from rptrain.models.params import Grads, Params
from rptrain.schedule.costs import Work


@dataclass(frozen=True)
class ExpertAdapters(Factors):
    """The adapters of each expert's product `name` [inputs, outputs], as PEFT's `target_parameters`.

    Their parameters: {name}_lora_A [E * rank, inputs] and {name}_lora_B [outputs, rank * E] (kernels/grouped_lora.py).
    """

    name: str
    experts: int
    active: int  # experts per token
    inputs: int
    outputs: int
    rank: int
    scale: float

    def add(self, p: Params, x: Tensor, y: Tensor, ends: Tensor) -> None:
        """Adds the adapters' outputs to y [N, outputs], the product of x; experts' rows end at `ends`."""
        add_grouped_lora(y, x, p[self.a], p[self.b], ends, self.scale)

    def backward_input(self, p: Params, dy: Tensor, dx: Tensor, ends: Tensor) -> Tensor:
        """Adds the adapters' part to dx, the gradient of the product's input; returns input for `backward_weights`."""
        return grouped_lora_backward_input(dy, p[self.a], p[self.b], ends, self.scale, dx)

    def backward_weights(self, p: Params, g: Grads, dy: Tensor, dh: Tensor, x: Tensor, ends: Tensor) -> None:
        """Accumulates the gradients of the adapters' parameters in `g`."""
        grouped_lora_backward_weights(dy, dh, x, p[self.a], ends, self.scale, g[self.a], g[self.b])

    def merge(self, p: Params, weight: Tensor) -> None:
        """Merges the adapters into the experts' weights in either layout (layers/moe.py); all have one dtype."""
        by_expert = weight if weight.dim() == 3 else weight.view(self.experts, -1, self.inputs).mT
        add_to_weights(by_expert, p[self.a], p[self.b], self.scale)

    def work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The work of forward and of backward: the product with A again, and gradients of both products' operands.

        Traffic: additions to the product and to the gradient of its input, B by expert, and its gradient accumulator.
        """
        rows = tokens * self.active
        down, up = 2.0 * rows * self.inputs * self.rank, 2.0 * rows * self.outputs * self.rank
        b = self.experts * self.rank * self.outputs
        forward = {"adapters": (2 * rows * self.outputs + 2 * b) * itemsize}
        backward = {"adapters, backward": (2 * rows * self.inputs + 2 * b) * itemsize + 6 * b * max(itemsize, 4)}
        return Work(grouped=down + up, elementwise=forward), Work(grouped=3 * down + 2 * up, elementwise=backward)

    def workspace(self, tokens: int, itemsize: int) -> int:
        """Bytes that backward needs: h and its gradient, and B's gradient by expert."""
        rows = tokens * self.active * self.rank * 2 * itemsize
        return rows + self.experts * self.rank * self.outputs * max(itemsize, 4)
