"""The contract of a layer: forward, forward that keeps tensors, backward, and what planning needs to know of them.

Shape suffixes, here and in the layers: T tokens of a micro-batch, D hidden size, H query heads, K key heads,
C head size, I intermediate size, E experts, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.models.params import Grads, Param, Params
from rptrain.schedule.costs import Work


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of the first R columns of queries and keys."""

    inv_freq: tuple[float, ...]  # R / 2 frequencies, scaling applied
    factor: float = 1.0  # of the tables of cosines and sines, and so of queries and keys (YaRN)
    query_scaling: "QueryScaling | None" = None  # a further factor of whole queries


@dataclass(frozen=True)
class QueryScaling:
    """Attention scaling by position, as in Llama 4: queries at position p are multiplied by
    1 + beta ln(1 + floor(p / original_max_position_embeddings)).
    """

    beta: float
    original_max_position_embeddings: float


class Operation(NamedTuple):
    """An operation of a layer that is timed by itself, without the rest of the layer."""

    name: str
    forward: Callable[[], object]
    backward: Callable[[], object]


class LayerShape(Protocol):
    """The properties of a layer that planning uses."""

    @property
    def name(self) -> str: ...

    @property
    def units(self) -> tuple[int, ...]:
        """Indices of the model's units that the layer reads."""
        ...

    @property
    def matrices(self) -> tuple[str, ...]:
        """The parameters that may be quantized, or multiplied in FP8."""
        ...

    @property
    def half_sums(self) -> bool:
        """Whether the layer sums products in float16 where kernels of ours can: models/transforms/half_sums.py."""
        ...

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        """The work of forward and of backward without the recomputed forward, for sequences of `length` tokens.

        Traffic is the bytes of all operations except products, each as one fused kernel that reads and writes every
        operand once: norms (with the residual addition before or after them), rotations (with the
        norms of queries and keys), activations, residual additions, copies, the softmax of the loss. Operands of
        products and of attention are not included, except the weights of experts, which every pass reads once, however
        few tokens there are. Statistics and tables with a few numbers per token are left out.
        """
        ...

    def gradient_work(self, param: Param, tokens: int, itemsize: int) -> Work:
        """The products of backward for a parameter's gradient, which are not needed if it is frozen."""
        ...

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes kept from the recomputed forward until backward."""
        ...

    def workspace_bytes(self, tokens: int, itemsize: int, *, fused: bool = False) -> int:
        """Upper bound of the bytes that backward needs at once, including its input gradient, without the kept bytes.

        `fused` kernels store no upcast copies; the reference operations do.
        """
        ...


class Layer(LayerShape, Protocol):
    """A layer computes without autograd: `backward` takes what `forward_saved` kept.

    It has only sizes; parameters and gradient accumulators are arguments. Results never alias inputs. The tensor
    between two layers is [T, D] in the model's dtype.
    """

    def forward(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor: ...

    def forward_saved(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[Tensor, Any]: ...

    def recompute(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Any:
        """The tensors that `forward_saved` keeps, without the work for its output only."""
        ...

    def backward(self, p: Params, g: Grads, saved: Any, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        """Accumulates the gradients of the parameters in `g`, and returns the gradient of the input."""
        ...


class HeadLayer(LayerShape, Protocol):
    """The last layer: final norm, output projection and loss, fused so that logits are never stored whole."""

    def loss(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor:
        """The sum of the cross-entropy over supervised tokens: a scalar, float32 (float64 for float64 models)."""
        ...

    def loss_backward(self, p: Params, g: Grads, x_TD: Tensor, mb: MicroBatch, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the unscaled loss sum, and the gradient of `scale` times the loss with respect to the input.

        Accumulates the parameters' gradients of the scaled loss in `g`.
        """
        ...

    def logits(self, p: Params, x_TD: Tensor) -> Tensor: ...
