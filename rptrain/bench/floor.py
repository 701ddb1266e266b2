"""The floor, or roofline time: the least time for a training step's arithmetic on a device, operation by operation.

Matrix products use torch; those of experts run as in training, with equal numbers of tokens per expert. Attention uses
the fastest deterministic implementation, and so does the delta rule. Elementwise operations read and write each operand
once, at the speed of a copy. A layer's operations are timed in a row, again and again, because a device in training may
be too warm for its highest clock. Gradient accumulation, rotary tables and transfers are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rptrain.bench import clock
from rptrain.engine.meter import likeness
from rptrain.kernels import fp8, fp8_products, grouped_fp8, half
from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.grouped import grouped_mm, grouped_weight_grad
from rptrain.kernels.launch import fused
from rptrain.kernels.reference.dense import wide
from rptrain.models.layer import LayerShape, Operation
from rptrain.models.layers.block import Block, blocks
from rptrain.models.params import Param
from rptrain.models.spec import ModelSpec

COPY = 512 << 20  # bytes that the timed copy reads and writes


@dataclass(frozen=True)
class Line:
    """An operation of a layer, timed separately: seconds in forward and in backward, for one micro-batch."""

    operation: str
    forward: float
    backward: float


@dataclass(frozen=True)
class LayerFloor:
    """The floor of one kind of layers, for one layer and one micro-batch."""

    name: str  # the first layer of its kind
    count: int
    forward: float  # seconds of all its operations in a row
    backward: float
    lines: tuple[Line, ...]  # their sum may differ: separately timed operations find a cooler device
    recomputed: bool  # the head is computed forward and backward at once

    def seconds(self, recompute: bool = True) -> float:
        """Seconds of such a layer for a micro-batch: forward, the recomputed forward if there is one, and backward."""
        return (1 + (recompute and self.recomputed)) * self.forward + self.backward


@dataclass(frozen=True)
class Floor:
    """The floor of a model for micro-batches of `tokens` tokens."""

    layers: tuple[LayerFloor, ...]
    tokens: int
    copy: float  # bytes per second, read and written

    def tokens_per_second(self, recompute: bool = True) -> float:
        """Tokens per second of one device."""
        return self.tokens / sum(layer.count * layer.seconds(recompute) for layer in self.layers)


def floor(spec: ModelSpec, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Floor:
    """Measures the floor on `device`, for micro-batches of `rows` sequences of `length` tokens.

    Needs memory for the weights, gradients and activations of one layer at a time.
    """
    tokens = rows * length
    halves = [torch.empty(COPY // 2, dtype=torch.uint8, device=device) for _ in range(2)]
    rate = COPY / clock.seconds({"copy": lambda: halves[0].copy_(halves[1])}, device, cold=False)["copy"]
    mb = _whole_sequences(rows, length, device)
    layers = []

    def add(layer: LayerShape, count: int, operations: list[Operation], *, recomputed: bool) -> None:
        ahead, back = layer.work(tokens, length, dtype.itemsize)
        lines = [*_lines(operations, device), *_elementwise(ahead.elementwise, back.elementwise, rate)]
        moves = Operation("moves", partial(_move, halves, ahead.traffic), partial(_move, halves, back.traffic))
        forward, backward = _in_a_row([*operations, moves], recomputed, device)
        layers.append(LayerFloor(layer.name, count, forward, backward, tuple(lines), recomputed))

    for block, count in _kinds(spec):
        operations = [*_products(spec, block, tokens, dtype, device)]
        if choices := block.mixer.operations(mb, dtype, device):
            taken = [2 * line.forward + line.backward for line in _lines(choices, device)]
            operations.append(choices[taken.index(min(taken))])
        add(block, count, operations, recomputed=True)
    add(spec.head, 1, [*_head_products(spec, tokens, dtype, device)], recomputed=False)
    return Floor(tuple(layers), tokens, rate)


def _lines(operations: Sequence[Operation], device: torch.device) -> list[Line]:
    """Times each operation separately, all of them in turn."""
    works = {
        (operation.name, which): work
        for operation in operations
        for which, work in (("forward", operation.forward), ("backward", operation.backward))
    }
    taken = clock.seconds(works, device, cold=False)
    return [Line(o.name, taken[o.name, "forward"], taken[o.name, "backward"]) for o in operations]


def _in_a_row(operations: Sequence[Operation], recomputed: bool, device: torch.device) -> tuple[float, float]:
    """Times forward and backward of all operations; forward runs as often as in training, so the device is as warm."""

    def forward() -> None:
        for operation in operations:
            operation.forward()

    def backward() -> None:
        for operation in operations:
            operation.backward()

    again = {"recomputed": forward} if recomputed else {}
    taken = clock.seconds({"forward": forward, **again, "backward": backward}, device, cold=False)
    return taken["forward"], taken["backward"]


def _move(halves: list[Tensor], nbytes: float) -> None:
    """A copy that reads and writes `nbytes` bytes in total."""
    left = int(nbytes) // 2
    while left > 0:
        piece = min(left, len(halves[0]))
        halves[0][:piece].copy_(halves[1][:piece])
        left -= piece


def _kinds(spec: ModelSpec) -> list[tuple[Block, int]]:
    """One block of each kind, and their number."""
    found: dict[Any, list[Block]] = {}
    for block in blocks(spec):
        found.setdefault(likeness(spec, block), []).append(block)
    return [(alike[0], len(alike)) for alike in found.values()]


def _products(
    spec: ModelSpec, block: Block, tokens: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Operation]:
    """Products of x [T, in] with each weight [out, in]; backward computes gradients of the input and of trained
    weights.
    """
    of_experts = {product.name: product for product in block.expert_products}
    for unit in (spec.units[index] for index in block.units):
        for param in unit.params:
            if (product := of_experts.get(param.name)) is not None:
                rows = tokens * product.active
                if param.in_fp8:
                    products = _grouped_fp8(param, rows, unit.trainable, dtype, device)
                else:
                    w = product.whole(torch.randn(param.shape, dtype=dtype, device=device))
                    products = _grouped(w, rows, unit.trainable)
                name = f"{param.name} {product.inputs} x {product.outputs} x {product.experts}"
                yield Operation(name, *products)
            elif len(param.shape) == 2 and not param.name.endswith("bias"):
                operands = _operands(param, tokens, dtype, device)
                yield _named(param, (_product_fp8 if param.in_fp8 else _product)(*operands, unit.trainable))


def _head_products(spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device) -> Iterator[Operation]:
    """As `_products`, of the head."""
    for unit in (spec.units[index] for index in spec.head.units):
        for param in (param for param in unit.params if len(param.shape) == 2):
            w, x, y = _operands(param, tokens, dtype, device)
            half_sums = spec.head.half_sums and fused(x) and half.takes(x)
            yield _named(param, (_product_half if half_sums else _product)(w, x, y, unit.trainable))


def _operands(param: Param, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [out, in], an input and an output."""
    out, size = param.shape
    shapes = (out, size), (tokens, size), (tokens, out)
    w, x, y = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    return w, x, y


def _named(param: Param, works: tuple[clock.Work, clock.Work]) -> Operation:
    out, size = param.shape
    return Operation(f"{param.name} {size} x {out}", *works)


def _product(w: Tensor, x: Tensor, y: Tensor, trained: bool) -> tuple[clock.Work, clock.Work]:
    dw, dx = torch.empty_like(w), torch.empty_like(x)

    def backward() -> None:
        torch.mm(y, w, out=dx)
        if trained:
            torch.mm(y.t(), x, out=dw)

    return lambda: torch.mm(x, w.t(), out=y), backward


def _product_half(w: Tensor, x: Tensor, y: Tensor, trained: bool) -> tuple[clock.Work, clock.Work]:
    """Products with half sums."""
    dw, dx = torch.empty_like(w), torch.empty_like(x)

    def backward() -> None:
        half.product(dx, y, w.t())
        if trained:
            half.product(dw, y.t(), x.t())

    return lambda: half.product(y, x, w), backward


def _product_fp8(w: Tensor, x: Tensor, y: Tensor, trained: bool) -> tuple[clock.Work, clock.Work]:
    """Products of operands that are quantized already: the floor leaves quantization out.

    The gradient of the weight, too, is written in x's dtype.
    """
    rows = [fp8.quantize_rows(tensor) for tensor in (x, w, y)]
    columns = [fp8.quantize_columns(tensor) for tensor in (x, w, y)]

    def backward() -> None:
        fp8_products.product(rows[2], columns[1], x.dtype)
        if trained:
            fp8_products.product(columns[2], columns[0], x.dtype)

    return lambda: fp8_products.product(rows[0], rows[1], x.dtype), backward


def _grouped(w: Tensor, rows: int, trained: bool) -> tuple[clock.Work, clock.Work]:
    """Products with weights [E, in, out] for equal numbers of tokens per expert."""
    experts, size, out = w.shape
    x, y = (torch.randn(rows, columns, dtype=w.dtype, device=w.device) for columns in (size, out))
    ends = _even(rows, experts, w.device)
    dw = torch.zeros_like(w, dtype=wide(w.dtype))

    def backward() -> None:
        grouped_mm(y, w.mT, ends)
        if trained:
            grouped_weight_grad(dw, x, y, ends)

    return lambda: grouped_mm(x, w, ends), backward


def _grouped_fp8(
    param: Param, rows: int, trained: bool, dtype: torch.dtype, device: torch.device
) -> tuple[clock.Work, clock.Work]:
    """As `_grouped`, of operands that are quantized already."""
    w = param.fp8_view(torch.empty(param.fp8_bytes(columns=True), dtype=torch.uint8, device=device), columns=True)
    w.write(param.dequantized_view(torch.randn(param.numel, dtype=dtype, device=device)))
    experts, *sizes = w.rows.codes.shape
    ends = _even(rows, experts, device)
    values = [torch.randn(rows, size, dtype=dtype, device=device) for size in sizes]
    outer, inner = (fp8.quantize_rows(x) for x in values)  # with as many columns as the weight has rows, or columns
    columns = grouped_fp8.quantize_columns(values[0], inner.scales, ends)
    turned, dw = grouped_fp8.transpose(inner.codes, ends), torch.zeros(w.rows.codes.shape, device=device)
    assert w.columns is not None
    along = partial(grouped_fp8.product, inner, *w.rows, ends, None, dtype)
    across = partial(grouped_fp8.product, outer, w.columns, None, ends, None, dtype)
    forward, back = (across, along) if w.by_input else (along, across)

    def backward() -> None:
        back()
        if trained:
            grouped_fp8.accumulate(dw, columns, turned, ends)

    return forward, backward


def _even(rows: int, experts: int, device: torch.device) -> Tensor:
    """Where the rows of each expert end if all have equally many."""
    return (torch.arange(1, experts + 1, device=device) * rows // experts).int()


def _whole_sequences(rows: int, length: int, device: torch.device) -> MicroBatch:
    positions = torch.arange(length, device=device).repeat(rows)
    return MicroBatch(
        sequences=rows,
        length=length,
        positions=positions,
        labels=positions,
        cu_seqlens=torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device),
        max_seqlen=length,
        uniform=True,
    )


def _elementwise(forward: Mapping[str, float], backward: Mapping[str, float], rate: float) -> Iterator[Line]:
    """The time of elementwise operations: their bytes at the rate of a copy."""
    for name in {**forward, **backward}:
        yield Line(name, forward.get(name, 0.0) / rate, backward.get(name, 0.0) / rate)
