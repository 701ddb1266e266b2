"""Low-rank adapters of a block's product: computation and costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.dora import TOKENS, magnitude_backward, rescale, row_norms
from rptrain.kernels.dropout import Dropout
from rptrain.kernels.linear import Weight, linear_backward_input
from rptrain.kernels.lora import add_lora, lora_backward_input, lora_backward_weights, parts
from rptrain.kernels.reference.dense import wide
from rptrain.models.params import Grads, Params
from rptrain.schedule.costs import Work, scaled

ROWS = 1024  # of a weight in FP8 that are dequantized at a time for their norms


class Passed(NamedTuple):
    """The tensors that the adapters' backward pass for the weights needs."""

    dy: Tensor  # [T, outputs]; with DoRA, the gradient before the magnitudes
    dh: Tensor  # [T, R], the gradient of the product with A
    norms: Tensor | None  # kernels/dora.py


class Factors:
    """The names of the parameters of the adapters of product `name`."""

    name: str

    @property
    def params(self) -> tuple[str, ...]:
        return self.a, self.b

    @property
    def a(self) -> str:
        return f"{self.name}_lora_A"

    @property
    def b(self) -> str:
        return f"{self.name}_lora_B"


@dataclass(frozen=True)
class Adapters(Factors):
    """The adapters of product `name` [outputs, inputs] (Hu et al. 2021, arXiv 2106.09685), one for each of some parts.

    Their parameters: {name}_lora_A [R, inputs], R = rank x parts, and {name}_lora_B [the parts' widths, rank]; with
    DoRA also {name}_lora_magnitude [the parts' widths], and no dropout.
    """

    name: str
    outputs: int
    starts: tuple[int, ...]  # the first column of each part in the product
    widths: tuple[int, ...]
    inputs: int
    rank: int
    scale: float
    dropout: float
    dora: bool
    mask: int  # the number of the product's dropout mask in its layer: adapters that share an input share its mask
    layer: int = field(compare=False)  # a number that is unique to the layer, for its masks

    def add(self, p: Params, x: Tensor, y: Tensor, mb: MicroBatch | None) -> None:
        """Adds the adapters' outputs to y, the product of x; with DoRA, scales the sum, which must not include a bias.

        No `mb`: without dropout.
        """
        add_lora(y, x, p[self.a], self._b(p), self.starts, self.scale, self._mask(mb))
        if self.dora:
            rescale(y, self._factors(p, self.norms(p, p[self.name])), self.widths, self.starts)

    def backward_input(
        self, p: Params, dy: Tensor, mb: MicroBatch, total: Tensor | None = None
    ) -> tuple[Tensor, Passed]:
        """The gradient of the product's input, and the input of `backward_weights`.

        `total`: see `linear_backward_input`.
        """
        norms = None
        if self.dora:
            norms = self.norms(p, p[self.name])
            dy = rescale(dy.clone(), self._factors(p, norms), self.widths, self.starts)
        dx = linear_backward_input(dy, p[self.name], total)
        dh = lora_backward_input(dy, p[self.a], self._b(p), self.starts, self.scale, self._mask(mb), dx)
        return dx, Passed(dy, dh, norms)

    def backward_weights(self, p: Params, g: Grads, dy: Tensor, passed: Passed, x: Tensor, mb: MicroBatch) -> None:
        """Accumulates the gradients of the adapters' parameters in `g`."""
        mask, form = self._mask(mb), (self.starts, self.scale)
        lora_backward_weights(passed.dy, passed.dh, x, p[self.a], *form, mask, g[self.a], self._b(g))
        if passed.norms is not None:
            weights = p[self.name], p[self.a], self._b(p)
            magnitude_backward(dy, x, *weights, *form, passed.norms, g[self.magnitude])

    def norms(self, p: Params, weight: Weight) -> Tensor:
        """The norms of the rows of the product's weight with its adapters, [the parts' widths]."""
        if not isinstance(weight, Tensor):
            return self.norms_by_rows(
                p, lambda start, stop: weight.part(slice(start, stop)).rows.dequantize(p[self.a].dtype), ROWS
            )
        return row_norms(weight, p[self.a], self._b(p), self.starts, self.scale)

    def norms_by_rows(self, p: Params, weight: Callable[[int, int], Tensor], step: int) -> Tensor:
        """`norms`, computed for at most `step` rows at a time, which `weight(start, stop)` returns."""
        found = []
        for rows, ranks, columns in parts(self._b(p), self.starts):
            for first in range(rows.start, rows.stop, step):
                some = weight(first, min(first + step, rows.stop))
                begin = first - rows.start
                found.append(row_norms(some, p[self.a][ranks], (columns[begin : begin + len(some)],), (0,), self.scale))
        return torch.cat(found)

    def merge(self, p: Params, weight: Tensor) -> None:
        """Merges the adapters into the product's weight, which need not be in `p`; all have one dtype."""
        factors = self._factors(p, self.norms(p, weight)).split(self.widths) if self.dora else None
        first = 0
        for number, (start, columns) in enumerate(zip(self.starts, self._b(p), strict=True)):
            rows = weight[start : start + len(columns)]
            rows.addmm_(columns, p[self.a][first : first + self.rank], alpha=self.scale)
            if factors is not None:
                rows.mul_(factors[number].unsqueeze(1))
            first += self.rank

    @property
    def params(self) -> tuple[str, ...]:
        return (self.a, self.b, self.magnitude) if self.dora else (self.a, self.b)

    @property
    def magnitude(self) -> str:
        return f"{self.name}_lora_magnitude"

    @property
    def ranks(self) -> int:
        """The rank of all parts together: R."""
        return self.rank * len(self.widths)

    def work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The work of forward and of backward: the product with A again, and gradients of both products' operands.

        Traffic: additions to the product and to the gradient of its input, and dropout; separately, the inputs and
        gradients that the products read, which have few columns to compute with them. With DoRA, also the norms of the
        rows and the scaling in each direction; backward computes the product again, for its product with dy. In FP8
        this is counted as without.
        """
        adapted = sum(self.widths)
        down, up = 2.0 * tokens * self.inputs * self.ranks, 2.0 * tokens * adapted * self.rank
        masked = 2 * self.inputs if self.dropout else 0
        forward = {"adapters": 2 * adapted + masked}
        backward = {"adapters, backward": 2 * self.inputs + masked + (self.inputs if self.dropout else 0)}
        read = tokens * itemsize * self.inputs
        ahead = Work(matmul=down + up, elementwise=scaled(forward, tokens * itemsize), low_rank=read)
        back = Work(
            matmul=3 * down + 2 * up,
            elementwise=scaled(backward, tokens * itemsize),
            low_rank=2 * (read + tokens * itemsize * adapted),
        )
        if not self.dora:
            return ahead, back
        norms = Work(
            matmul=2.0 * adapted * self.inputs * self.rank,
            elementwise={"magnitudes": (adapted * self.inputs + tokens * 2 * adapted) * itemsize},
        )
        again = Work(
            matmul=2.0 * tokens * self.inputs * adapted + down + up,
            elementwise={"magnitudes": tokens * 2 * adapted * itemsize},
        )
        return ahead + norms, back + norms + again

    def workspace(self, tokens: int, itemsize: int) -> int:
        """Bytes that backward needs: h and its gradient, also in the wide type, and the input after dropout.

        With DoRA also the scaled gradient, the product of some tokens with its gradient, and the rows' norms.
        """
        upcast = max(itemsize, 4)
        each = (2 * itemsize + upcast) * self.ranks + (itemsize * self.inputs if self.dropout else 0)
        if not self.dora:
            return tokens * each
        again = min(tokens, TOKENS) * max(self.widths) * (itemsize + upcast + (upcast if itemsize < 4 else 0))
        return tokens * (each + itemsize * self.outputs) + again + sum(self.widths) * (self.rank + 4) * upcast

    @property
    def dequantized_bytes(self) -> int:
        """Bytes that `norms` needs of a weight in FP8; only with DoRA."""
        return 12 * min(ROWS, max(self.widths)) * self.inputs if self.dora else 0

    def _b(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tensors[self.b].split(self.widths)

    def _factors(self, p: Params, norms: Tensor) -> Tensor:
        return p[self.magnitude].to(wide(norms.dtype)) / norms

    def _mask(self, mb: MicroBatch | None) -> Dropout | None:
        if mb is None or mb.sample is None or not self.dropout:
            return None
        return Dropout(self.dropout, mb.sample, mb.length, self.layer, self.mask)
