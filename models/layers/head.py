"""The head: final norm, output projection and loss, without autograd."""

from dataclasses import dataclass, replace

from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.linear import linear
from rptrain.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
    loss_workspace_bytes,
)
from rptrain.kernels.rms_norm import rms_norm, rms_norm_backward
from rptrain.models.layers.product import product_gradient, times_
from rptrain.models.params import Grads, Param, Params
from rptrain.schedule.costs import Work, scaled


@dataclass(frozen=True)
class Head:
    """Final norm, output projection and loss. Parameters: norm [D], and `projection` [V, D]."""

    units: tuple[int, ...]  # of the norm and of the projection
    projection: str  # "embed" if the embedding table is the projection (tied), otherwise "head"
    hidden: int
    vocab: int
    eps: float
    name: str = "head"
    half_sums: bool = False  # products are summed in float16: models/transforms/half_sums.py
    scale: float = 1.0  # factor of the logits
    zero_centered: bool = False  # the norm's factors are 1 + weight

    @property
    def matrices(self) -> tuple[str, ...]:
        return ()

    def loss(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor:
        normed, _ = self._normed(p, x_TD)
        return linear_cross_entropy(normed, p[self.projection], mb.labels, half_sums=self.half_sums)

    def loss_backward(self, p: Params, g: Grads, x_TD: Tensor, mb: MicroBatch, scale: float) -> tuple[Tensor, Tensor]:
        normed, rstd = self._normed(p, x_TD)
        projection = p[self.projection], mb.labels, scale, g.get(self.projection)
        loss, dnormed = linear_cross_entropy_backward(normed, *projection, half_sums=self.half_sums)
        norm = x_TD, p["norm"], rstd, g.get("norm")
        return loss, rms_norm_backward(times_(dnormed, self.scale), *norm, zero_centered=self.zero_centered)

    def logits(self, p: Params, x_TD: Tensor) -> Tensor:
        """[T, V] in the model's dtype."""
        return linear(self._normed(p, x_TD)[0], p[self.projection])

    def _normed(self, p: Params, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the projection, scaled in place of the logits, and 1 / rms."""
        normed, rstd = rms_norm(x_TD, p["norm"], self.eps, zero_centered=self.zero_centered)
        return times_(normed, self.scale), rstd

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        """The work: the softmax reads the logits, and in backward writes their gradient; both use the same logits."""
        matmul = 2.0 * tokens * self.hidden * self.vocab
        forward = {"norm": 2 * self.hidden, "softmax": self.vocab}
        backward = {"norm, backward": 3 * self.hidden, "softmax, backward": self.vocab}
        half = matmul if self.half_sums and itemsize == 2 else 0.0
        return (
            Work(matmul=matmul, half=half, elementwise=scaled(forward, tokens * itemsize)),
            Work(matmul=2 * matmul, half=2 * half, elementwise=scaled(backward, tokens * itemsize)),
        )

    def gradient_work(self, param: Param, tokens: int, itemsize: int) -> Work:
        work = product_gradient(param, tokens)
        return replace(work, half=work.matmul) if self.half_sums and itemsize == 2 else work

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        return 0

    def workspace_bytes(self, tokens: int, itemsize: int, *, fused: bool = False) -> int:
        """The norm's input and output, gradients of both, and one chunk of logits."""
        wide = 0 if fused else 4 * max(itemsize, 4) - itemsize
        logits = loss_workspace_bytes(tokens, self.vocab, itemsize, fused=fused)
        return tokens * self.hidden * (4 * itemsize + wide) + logits
