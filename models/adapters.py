"""The low-rank adapters of a block's product: what they compute, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rptrain.kernels.dropout import Dropout
from rptrain.kernels.lora import add_lora, lora_backward_input, lora_backward_weights
from rptrain.models.spec import Grads, MicroBatch, Params
from rptrain.plan.costs import Work, scaled

PLACES = ("qkv", "o", "gate_up", "down")  # of masks in a layer: the adapters of one product share an input and its mask


@dataclass(frozen=True)
class Adapters:
    """Those of the product `name` [outputs, inputs] (Hu et al. 2021, arXiv 2106.09685), one for each of some parts.

    Their parameters: {name}_lora_A [R, inputs], R = rank x parts, and {name}_lora_B [the parts' widths, rank].
    """

    name: str
    starts: tuple[int, ...]  # the first column of each part in the product
    widths: tuple[int, ...]
    inputs: int
    rank: int
    scale: float
    dropout: float

    def add(self, p: Params, x: Tensor, y: Tensor, layer: int, mb: MicroBatch | None) -> None:
        """Adds the adapters' outputs to y, the product of x; `layer` is any number that no other layer has."""
        add_lora(y, x, p[self.a], self._b(p), self.starts, self.scale, self._mask(layer, mb))

    def backward_input(self, p: Params, dy: Tensor, dx: Tensor, layer: int, mb: MicroBatch) -> Tensor:
        """Adds their part to dx; returns what `backward_weights` needs."""
        return lora_backward_input(dy, p[self.a], self._b(p), self.starts, self.scale, self._mask(layer, mb), dx)

    def backward_weights(
        self, p: Params, g: Grads, dy: Tensor, dh: Tensor, x: Tensor, layer: int, mb: MicroBatch
    ) -> None:
        """Adds the gradients of their parameters to `g`."""
        mask = self._mask(layer, mb)
        lora_backward_weights(dy, dh, x, p[self.a], self.starts, self.scale, mask, g[self.a], self._b(g))

    def merge(self, a: Tensor, b: Tensor, weight: Tensor) -> None:
        """Adds what the adapters do to the product's weight; all of one type."""
        first = 0
        for start, width, columns in zip(self.starts, self.widths, b.split(self.widths), strict=True):
            weight[start : start + width].addmm_(columns, a[first : first + self.rank], alpha=self.scale)
            first += self.rank

    @property
    def a(self) -> str:
        return f"{self.name}_lora_A"

    @property
    def b(self) -> str:
        return f"{self.name}_lora_B"

    @property
    def ranks(self) -> int:
        """Of all parts together: R."""
        return self.rank * len(self.widths)

    def work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """Forward and backward: the product with A again, and gradients of both products' operands.

        In traffic: what is added to the product and to the gradient of its input, and dropout.
        """
        down, up = 2.0 * tokens * self.inputs * self.ranks, 2.0 * tokens * sum(self.widths) * self.rank
        masked = 2 * self.inputs if self.dropout else 0
        forward = {"adapters": 2 * sum(self.widths) + masked}
        backward = {"adapters, backward": 2 * self.inputs + masked + (self.inputs if self.dropout else 0)}
        return (
            Work(matmul=down + up, elementwise=scaled(forward, tokens * itemsize)),
            Work(matmul=3 * down + 2 * up, elementwise=scaled(backward, tokens * itemsize)),
        )

    def workspace(self, itemsize: int) -> int:
        """Bytes a token that backward needs: h and its gradient, also in the wide type, and the input after dropout."""
        return (2 * itemsize + max(itemsize, 4)) * self.ranks + (itemsize * self.inputs if self.dropout else 0)

    def _b(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tensors[self.b].split(self.widths)

    def _mask(self, layer: int, mb: MicroBatch | None) -> Dropout | None:
        if mb is None or mb.sample is None or not self.dropout:
            return None
        return Dropout(self.dropout, mb.sample, mb.length, layer, PLACES.index(self.name))
