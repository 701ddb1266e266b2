"""What a model is made of: parameter units, layers, their sizes and costs.

Shape suffixes, here and in the layers: T tokens of a micro-batch, D hidden size, H query heads, K key heads,
C head size, I intermediate size, E experts, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.quant import Format, Quantized
from rptrain.schedule.costs import Work

ALIGNMENT = 128  # elements: 256 bytes in 16-bit types, the widest vector loads and DMA bursts in use

Params = Mapping[str, Tensor]  # a layer's parameters by name, in the model's dtype
Grads = Mapping[str, Tensor]  # accumulators of the trainable ones, of their shapes, float32 (float64 for float64)


@dataclass(frozen=True)
class CheckpointPart:
    """A tensor of the checkpoint: `rows` consecutive rows of a stored parameter."""

    key: str
    rows: int
    mxfp4: bool = False  # whether it may be stored in 4 bits: models/weights/mxfp4.py


@dataclass(frozen=True)
class Stack:
    """A tensor [count, rows / count, ...] of a checkpoint that holds a stored parameter of `rows` rows whole."""

    key: str
    count: int


@dataclass(frozen=True)
class Param:
    """A parameter of a unit; several checkpoint tensors may be stacked in it along dimension 0."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[CheckpointPart, ...]
    decay: bool = True
    std: float | None = 0.02  # of the normal initialization; 0: zeros, None: ones
    bound: float | None = None  # of a uniform initialization in its place
    stack: Stack | None = None  # what checkpoints may have in place of the parts
    format: Format | None = None  # of a frozen one that is held in 4 or 8 bits

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def transposed(self) -> bool:
        """Whether [E, in, out] is held as [E, out, in], as checkpoints in MXFP4 hold it."""
        return self.format is not None and any(part.mxfp4 for part in self.parts)

    def nbytes(self, itemsize: int) -> int:
        """In its unit's flat buffer, padding included."""
        return _padded(self.numel) * itemsize if self.format is None else self.format.nbytes(self.numel)

    def dequantized_view(self, flat: Tensor) -> Tensor:
        """The parameter, with its shape, as a view of its dequantized elements in the stored order."""
        if not self.transposed:
            return flat.view(self.shape)
        experts, inner, outer = self.shape
        return flat.view(experts, outer, inner).mT


@dataclass(frozen=True)
class Segment:
    """Where a parameter lies in its unit's flat buffers: an offset in elements."""

    param: Param
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.param.numel


@dataclass(frozen=True)
class Unit:
    """A flat buffer of parameters, with events, generations and optimizer states of its own.

    Layers refer to units; tied embeddings are one unit that the embedding and the head both refer to. A unit that is
    not `trainable` is frozen: it has one generation, no gradient and no states, and never changes. Parameters of it may
    be quantized; its flat buffer then is bytes, `nbytes` of them.
    """

    name: str
    params: tuple[Param, ...]
    trainable: bool = True

    @property
    def segments(self) -> tuple[Segment, ...]:
        segments, offset = [], 0
        for param in self.params:
            segments.append(Segment(param, offset))
            offset += _padded(param.numel)
        return tuple(segments)

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included; of one that is quantized, were it not."""
        return sum(_padded(param.numel) for param in self.params)

    @cached_property
    def quantized(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.format is not None)

    @cached_property
    def dequantized_numel(self) -> int:
        """Elements of a buffer for the dequantized copies of the quantized parameters, padding included."""
        return sum(_padded(param.numel) for param in self.quantized)

    @cached_property
    def quantized_bytes(self) -> int:
        """Bytes of the flat buffer that the quantized parameters take."""
        return sum(param.nbytes(0) for param in self.quantized)

    def nbytes(self, itemsize: int) -> int:
        """Of the flat buffer, with numbers of this size where they are not quantized."""
        return (self.numel - self.dequantized_numel) * itemsize + self.quantized_bytes

    def held(self, flat: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Quantized]]:
        """The parameters as views of the flat buffer's bytes: those in `dtype`, and those that are quantized."""
        plain, quantized, at = dict[str, Tensor](), dict[str, Quantized](), 0
        for param in self.params:
            mine = flat[at : at + param.nbytes(dtype.itemsize)]
            at += len(mine)
            if param.format is None:
                plain[param.name] = mine.view(dtype)[: param.numel].view(param.shape)
            else:
                quantized[param.name] = Quantized.of(mine, param.numel, param.format)
        return plain, quantized

    def dequantize(self, quantized: Mapping[str, Quantized], dtype: torch.dtype) -> dict[str, Tensor]:
        """Those of `held` that are quantized, dequantized."""
        flats = self.places(torch.empty(self.dequantized_numel, dtype=dtype))
        return {p.name: p.dequantized_view(quantized[p.name].dequantize(flats[p.name])) for p in self.quantized}

    def places(self, flat: Tensor) -> dict[str, Tensor]:
        """Splits a buffer of `dequantized_numel` elements into a flat view per quantized parameter, as stored."""
        places, at = {}, 0
        for param in self.quantized:
            places[param.name] = flat[at : at + param.numel]
            at += _padded(param.numel)
        return places

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters as views of a flat buffer of `numel` elements."""
        return {s.param.name: flat[s.offset : s.stop].view(s.param.shape) for s in self.segments}


def _padded(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


class LayerShape(Protocol):
    """What planning needs to know of a layer."""

    @property
    def name(self) -> str: ...

    @property
    def units(self) -> tuple[int, ...]:
        """Indices of the model's units that the layer reads."""
        ...

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        """The work of forward and of backward (the recomputed forward not counted), in rows of `length` tokens.

        Traffic is the bytes of the operations that are not products, each as one fused kernel that reads and
        writes every operand once: norms (with the residual addition before or after them), rotations (with the
        norms of queries and keys), activations, residual additions, copies, the softmax of the loss. Operands of
        products, attention's included, are not in it, but for the weights of experts: they are read once a pass
        however few tokens there are. Statistics and tables of a few numbers a token are left out.
        """
        ...

    def gradient_work(self, param: Param, tokens: int) -> Work:
        """The part of backward's products that makes a parameter's gradient: what it does without if that is frozen."""
        ...

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes that are kept from the recomputed forward until backward."""
        ...

    def workspace_bytes(self, tokens: int, itemsize: int, *, fused: bool = False) -> int:
        """Upper bound of the bytes that backward needs at once beside what is kept, the gradient that it is given too.

        `fused` kernels hold nothing wide in memory; the oracle's plain operations do.
        """
        ...


class Layer(LayerShape, Protocol):
    """A layer computes without autograd: `backward` takes what `forward_saved` kept.

    It holds sizes only; parameters and gradient accumulators are passed in. Nothing it returns aliases its
    inputs, and between layers one tensor passes, [T, D] in the model's dtype.
    """

    def forward(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor: ...

    def forward_saved(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[Tensor, Any]: ...

    def recompute(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Any:
        """What `forward_saved` keeps, without what only its output takes."""
        ...

    def backward(self, p: Params, g: Grads, saved: Any, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        """Adds the gradients of the parameters in `g` to them and returns that of the input."""
        ...


class HeadLayer(LayerShape, Protocol):
    """The last layer: final norm, output projection and loss, fused so that logits are never stored whole."""

    def loss(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor:
        """Sum of the cross-entropy over supervised tokens: a scalar, float32 (float64 for float64 models)."""
        ...

    def loss_backward(self, p: Params, g: Grads, x_TD: Tensor, mb: MicroBatch, scale: float) -> tuple[Tensor, Tensor]:
        """The unscaled loss sum, and the gradient of `scale` times it with respect to the input.

        Adds the gradients of the scaled loss to the parameters in `g`.
        """
        ...

    def logits(self, p: Params, x_TD: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class ModelShape:
    """What a plan is made from: units[0] is the embedding table (its parameter is named `embed`), on the host.

    `layers` are the blocks in order; `head` comes after them. `config` is the checkpoint's config.json.
    """

    architecture: str
    config: Mapping[str, Any]
    units: tuple[Unit, ...]
    layers: tuple[LayerShape, ...]
    head: LayerShape
    hidden_size: int
    vocab_size: int
    tied: bool

    @property
    def stack(self) -> tuple[LayerShape, ...]:
        """Every layer that runs on a device, the head last."""
        return (*self.layers, self.head)

    def trained(self, units: Iterable[int]) -> tuple[int, ...]:
        """Those of the units that are trainable."""
        return tuple(unit for unit in units if self.units[unit].trainable)

    @property
    def frozen(self) -> tuple[int, ...]:
        """The units that are not trainable."""
        return tuple(index for index, unit in enumerate(self.units) if not unit.trainable)

    @property
    def num_parameters(self) -> int:
        return sum(param.numel for unit in self.units for param in unit.params)


@dataclass(frozen=True)
class ModelSpec(ModelShape):
    """A model whose layers compute."""

    layers: tuple[Layer, ...]
    head: HeadLayer
    inv_freq: tuple[float, ...]  # C / 2 rotary frequencies, scaling applied
    rope_scale: float = 1.0  # of the tables of cosines and sines (YaRN)
    router_aux_loss_coef: float = 0.0  # models/layers/balance.py

    @property
    def stack(self) -> tuple[Layer | HeadLayer, ...]:
        return (*self.layers, self.head)
