"""Parameters of units: names, shapes, types, where checkpoints have them, and how they lie in flat buffers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels import fp8
from rptrain.kernels.quant import FP8_NAME, Format, Quantized

ALIGNMENT = 128  # elements: 256 bytes in 16-bit types, the widest vector loads and DMA bursts in use

# A layer's parameters by name: tensors in the model's dtype, or in that of `Param.dtype_in`. Those that `Param.in_fp8`
# marks may be FP8Weights, which only products read.
Params = Mapping[str, Any]
# Gradient accumulators of the trainable parameters, with their shapes, float32 (float64 for float64).
Grads = Mapping[str, Tensor]


@dataclass(frozen=True)
class CheckpointPart:
    """A tensor of the checkpoint: `rows` consecutive rows of a stored parameter."""

    key: str
    rows: int
    mxfp4: bool = False  # whether it may be stored in 4 bits: models/weights/mxfp4.py


@dataclass(frozen=True)
class Stack:
    """A tensor [count, rows / count, ...] of a checkpoint that contains a whole stored parameter of `rows` rows."""

    key: str
    count: int


@dataclass(frozen=True)
class Param:
    """A parameter of a unit. Several checkpoint tensors may be stacked in it along dimension 0."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[CheckpointPart, ...]
    decay: bool = True
    std: float | None = 0.02  # standard deviation of the normal initialization; 0: zeros, None: ones
    bound: float | None = None  # bound of a uniform initialization instead
    log_uniform: tuple[float, float] | None = None  # or the bounds of a uniform number, of which this is the logarithm
    stack: Stack | None = None  # alternative to the parts in checkpoints
    format: Format | None = None  # of a frozen parameter in 4 or 8 bits
    in_fp8: bool = False  # whether layers multiply with it in FP8: models/transforms/fp8.py
    dtype: torch.dtype | None = None  # a type of its own: see `dtype_in`; None: the model's

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def dtype_in(self, model: torch.dtype) -> torch.dtype:
        """The type in which a model of this type holds the parameter: its own, unless the model's is wider."""
        return wider(self.dtype or model, model)

    @property
    def transposed(self) -> bool:
        """Whether [E, in, out] is stored as [E, out, in], as in MXFP4 checkpoints."""
        return self.format is not None and any(part.mxfp4 for part in self.parts)

    @property
    def matrices(self) -> tuple[int, ...]:
        """The sizes [N, K] of a matrix in memory, or [E, N, K] of those of experts."""
        if self.transposed:
            return self.shape[0], self.shape[2], self.shape[1]
        if self.stack is None:
            return self.shape
        return self.stack.count, self.shape[0] // self.stack.count, *self.shape[1:]

    @property
    def by_input(self) -> bool:
        """Whether the rows of these matrices are inputs, not outputs."""
        return len(self.shape) == 3 and not self.transposed

    def nbytes(self, itemsize: int) -> int:
        """Bytes in its unit's flat buffer, padding included."""
        if self.format is not None:
            return self.format.nbytes(self.numel)
        return _padded(self.numel) * max(itemsize, self.dtype.itemsize if self.dtype else 0)

    def fp8_bytes(self, *, columns: bool) -> int:
        """Bytes of the parameter in FP8, padding included; `columns`: with its transposed codes."""
        rows = self.numel // self.matrices[-1]
        return _padded((2 if columns else 1) * self.numel + 4 * rows)

    def fp8_view(self, buffer: Tensor, *, columns: bool) -> fp8.FP8Weight:
        """The parameter in FP8 as views of `fp8_bytes` bytes."""
        *outer, inner = self.matrices
        at = 4 * self.numel // inner
        codes = buffer[at:][: self.numel].view(fp8.FP8).view(self.matrices)
        transposed = self.columns_view(buffer[at + self.numel :]) if columns else None
        return fp8.FP8Weight(fp8.Rows(codes, buffer[:at].view(torch.float32).view(outer)), transposed, self.by_input)

    @property
    def held_in_fp8(self) -> bool:
        """Whether layers multiply with its codes as the host holds them."""
        return self.in_fp8 and self.format is not None and self.format.name == FP8_NAME

    def fp8_of(self, stored: Quantized) -> fp8.FP8Weight:
        """The codes and scales as layers read them, without transposed codes."""
        codes, scales = stored.codes.view(fp8.FP8).view(self.matrices), stored.scales.view(self.matrices[:-1])
        return fp8.FP8Weight(fp8.Rows(codes, scales), None, self.by_input)

    def columns_view(self, buffer: Tensor) -> Tensor:
        """The transposed codes as a view of a byte for each."""
        *experts, rows, inner = self.matrices
        return buffer[: self.numel].view(fp8.FP8).view(*experts, inner, rows)

    def reads_columns(self, *, backward: bool) -> bool:
        """Whether a stage reads the transposed codes: for the input's gradient, and forward if rows are inputs."""
        return backward or self.by_input

    def dequantized_view(self, flat: Tensor) -> Tensor:
        """The parameter, with its shape, as a view of its dequantized elements in the stored order."""
        if not self.transposed:
            return flat.view(self.shape)
        experts, inner, outer = self.shape
        return flat.view(experts, outer, inner).mT


@dataclass(frozen=True)
class Segment:
    """The place of a parameter in its unit's flat buffers: an offset in elements."""

    param: Param
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.param.numel


@dataclass(frozen=True)
class Unit:
    """A flat buffer of parameters, with its own events, generations and optimizer states.

    Layers refer to units; with tied embeddings, the embedding and the head refer to the same unit. A unit that is not
    `trainable` is frozen: it has one generation, no gradient and no states, and never changes. Its parameters may be
    quantized or have several types; it is then `mixed`, and its flat buffer has `nbytes` bytes.

    The parameters of a trainable unit have one type, that of `dtype_in`: its weights are held, uploaded, updated and
    saved in it, and its gradients are downloaded in it or in a wider one. With parameters in FP8, the unit has a wire
    format: codes and scales of these, and the other parameters in the unit's type. Devices read it in place of the flat
    buffer.
    """

    name: str
    params: tuple[Param, ...]
    trainable: bool = True

    def __post_init__(self) -> None:
        assert not (self.trainable and self.mixed), f"{self.name}: parameters that are trained have one type"

    @property
    def segments(self) -> tuple[Segment, ...]:
        segments, offset = [], 0
        for param in self.params:
            segments.append(Segment(param, offset))
            offset += _padded(param.numel)
        return tuple(segments)

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer without quantization, padding included."""
        return sum(_padded(param.numel) for param in self.params)

    @cached_property
    def quantized(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.format is not None)

    @cached_property
    def mixed(self) -> bool:
        """Whether the flat buffer is bytes, because not all parameters are in one type."""
        return bool(self.quantized) or len({param.dtype for param in self.params}) > 1

    def dtype_in(self, model: torch.dtype) -> torch.dtype:
        """The type of the flat buffer in a model of this type, unless the unit is mixed."""
        return self.params[0].dtype_in(model)

    @cached_property
    def in_fp8(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.in_fp8)

    @cached_property
    def codes_uploaded(self) -> tuple[Param, ...]:
        """The parameters in FP8 whose codes devices read; they transpose them."""
        return tuple(param for param in self.in_fp8 if self.wired or param.held_in_fp8)

    @cached_property
    def codes_made(self) -> tuple[Param, ...]:
        """The parameters in FP8 that devices quantize."""
        return tuple(param for param in self.in_fp8 if param not in self.codes_uploaded)

    @cached_property
    def dequantized(self) -> tuple[Param, ...]:
        """The quantized parameters that devices dequantize: those that layers do not read in FP8."""
        return tuple(param for param in self.quantized if not param.in_fp8)

    @property
    def wired(self) -> bool:
        """Whether devices read the wire format."""
        return self.trainable and bool(self.in_fp8)

    def prepared_bytes(self, itemsize: int, *, backward: bool) -> int:
        """Bytes of the parameters that a device makes from what is uploaded: dequantized ones, transposed codes of
        uploaded ones, and those that it quantizes to FP8.
        """
        made = sum(p.fp8_bytes(columns=p.reads_columns(backward=backward)) for p in self.codes_made)
        return self.dequantized_bytes(itemsize) + self._columns_bytes(backward=backward) + made

    def dequantized_bytes(self, itemsize: int) -> int:
        """Bytes of the parameters that a device dequantizes, padding included."""
        return sum(_padded(param.numel) for param in self.dequantized) * itemsize

    def _columns_bytes(self, *, backward: bool) -> int:
        return sum(_padded(p.numel) for p in self.codes_uploaded if p.reads_columns(backward=backward))

    def fp8_views(self, buffer: Tensor, *, backward: bool) -> dict[str, fp8.FP8Weight]:
        """The parameters that a device quantizes to FP8, as views of the bytes that `prepared_bytes` counts after the
        dequantized ones.
        """
        views, at = dict[str, fp8.FP8Weight](), self._columns_bytes(backward=backward)
        for param in self.codes_made:
            columns = param.reads_columns(backward=backward)
            views[param.name] = param.fp8_view(buffer[at:], columns=columns)
            at += param.fp8_bytes(columns=columns)
        return views

    def columns_views(self, buffer: Tensor, *, backward: bool) -> dict[str, Tensor]:
        """The transposes of uploaded codes that a stage reads, as views of the same bytes."""
        views, at = dict[str, Tensor](), 0
        for param in self.codes_uploaded:
            if param.reads_columns(backward=backward):
                views[param.name] = param.columns_view(buffer[at:])
                at += _padded(param.numel)
        return views

    def wire_bytes(self, itemsize: int) -> int:
        """Bytes that a device reads: of the wire format, or of the flat buffer."""
        if not self.wired:
            return self.nbytes(itemsize)
        return sum(p.fp8_bytes(columns=False) if p.in_fp8 else p.nbytes(itemsize) for p in self.params)

    def wire_views(self, buffer: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, fp8.FP8Weight]]:
        """The parameters as views of the wire format's bytes, in a model in `dtype`: those in the unit's type, and
        those in FP8, without columns.
        """
        plain, weights, at = dict[str, Tensor](), dict[str, fp8.FP8Weight](), 0
        for param in self.params:
            if param.in_fp8:
                weights[param.name] = param.fp8_view(buffer[at:], columns=False)
                at += param.fp8_bytes(columns=False)
            else:
                nbytes = param.nbytes(dtype.itemsize)
                flat = buffer[at : at + nbytes].view(param.dtype_in(dtype))
                plain[param.name] = flat[: param.numel].view(param.shape)
                at += nbytes
        return plain, weights

    @cached_property
    def dequantized_numel(self) -> int:
        """Elements of a buffer for the dequantized copies of the quantized parameters, padding included."""
        return sum(_padded(param.numel) for param in self.quantized)

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the flat buffer in a model whose type has `itemsize` bytes."""
        return sum(param.nbytes(itemsize) for param in self.params)

    def stored_views(self, flat: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Quantized]]:
        """The parameters as views of the flat buffer's bytes in a model in `dtype`: as they are, and quantized ones."""
        plain, quantized, at = dict[str, Tensor](), dict[str, Quantized](), 0
        for param in self.params:
            mine = flat[at : at + param.nbytes(dtype.itemsize)]
            at += len(mine)
            if param.format is None:
                plain[param.name] = mine.view(param.dtype_in(dtype))[: param.numel].view(param.shape)
            else:
                quantized[param.name] = Quantized.of(mine, param.numel, param.format)
        return plain, quantized

    def dequantize(self, quantized: Mapping[str, Quantized], dtype: torch.dtype) -> dict[str, Tensor]:
        """Those of `stored_views` that are quantized, dequantized."""
        flats = _places(self.quantized, torch.empty(self.dequantized_numel, dtype=dtype))
        return {p.name: p.dequantized_view(quantized[p.name].dequantize(flats[p.name])) for p in self.quantized}

    def places(self, flat: Tensor) -> dict[str, Tensor]:
        """Splits a buffer of `dequantized_bytes` into a flat view, as stored, of each parameter of `dequantized`."""
        return _places(self.dequantized, flat)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters as views of a flat buffer of `numel` elements."""
        return {s.param.name: flat[s.offset : s.stop].view(s.param.shape) for s in self.segments}


def wider(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The type with more bytes; the second of equally wide ones."""
    return first if first.itemsize > second.itemsize else second


def _places(params: Iterable[Param], flat: Tensor) -> dict[str, Tensor]:
    """A flat view for each parameter, one after the other."""
    places, at = {}, 0
    for param in params:
        places[param.name] = flat[at : at + param.numel]
        at += _padded(param.numel)
    return places


def _padded(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
