"""Quantize a checkpoint's tensors while they are read, and read quantized parameters."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.quant import Format, Quantized, quantize_into
from rptrain.models.spec import ModelShape
from rptrain.models.weights.safetensors_io import Stored, read_here

READ = 1 << 20  # bytes that a thread reads and quantizes at a time, if a block or a row of blocks has no more
CHUNK_NUMEL = 1 << 18  # elements of rows that a thread dequantizes at a time
QUANTIZING = 6 * READ  # upper bound of a thread's temporary memory: data, its transpose, and PyTorch's chunks


def readable(spec: ModelShape, stored: Callable[[int, str], Tensor | Quantized]) -> Callable[[int, str], Tensor]:
    """The parameters as they are stored; quantized ones as dequantized copies in the dtype of the others."""

    def view(index: int, name: str) -> Tensor:
        found = stored(index, name)
        if not isinstance(found, Quantized):
            return found
        embed = stored(0, spec.units[0].params[0].name)
        assert isinstance(embed, Tensor)
        param = next(param for param in spec.units[index].quantized if param.name == name)
        return param.dequantized_view(found.dequantize(torch.empty(param.numel, dtype=embed.dtype)))

    return view


def rows_each(weight: Tensor | Quantized | None, inputs: int) -> int:
    """Rows of a matrix (None: one in a file) to process at a time: whole blocks, about CHUNK_NUMEL elements."""
    block = weight.format.block if isinstance(weight, Quantized) else 1
    least = block // gcd(block, inputs)
    return max(CHUNK_NUMEL // inputs // least, 1) * least


def rows(weight: Tensor | Quantized, inputs: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows [start, stop), in whole blocks, of a matrix with `inputs` columns; dequantized if it is quantized."""
    if not isinstance(weight, Quantized):
        return weight[start:stop]
    part = weight.part(start * inputs, stop * inputs)
    return part.dequantize(torch.empty(part.numel, dtype=dtype)).view(stop - start, inputs)


class QuantizedRows(NamedTuple):
    """Rows of a stored tensor, and the targets of their codes [rows, bytes] and scales [rows, blocks].

    `stored` has the shape [rows, elements], or [elements, rows] if `turned`.
    """

    stored: Stored
    codes: Tensor
    scales: Tensor
    format: Format
    turned: bool


def pieces(stored: Stored, target: Quantized, turned: bool) -> Iterator[QuantizedRows]:
    """All pieces of a tensor; `turned`: [E, in, out], quantized as [E, out, in]."""
    fmt, size = target.format, stored.dtype.itemsize
    most = fmt.whole(READ // size)
    if not turned:
        for begin in range(0, target.numel, most):
            block = target.part(begin, min(begin + most, target.numel))
            part = replace(stored, offset=stored.offset + begin * size, shape=(1, block.numel))
            yield QuantizedRows(part, block.codes[None], block.scales[None], fmt, False)
        return
    experts, inner, outer = stored.shape
    codes, scales = (x.view(experts, outer, -1) for x in (target.codes, target.scales))
    inputs = fmt.whole(most // outer)
    for expert in range(experts):
        for begin in range(0, inner, inputs):
            end = min(begin + inputs, inner)
            at = stored.offset + (expert * inner + begin) * outer * size
            places = (
                codes[expert, :, fmt.code_bytes(begin) : fmt.code_bytes(end)],
                scales[expert, :, begin // fmt.block : end // fmt.block],
            )
            yield QuantizedRows(replace(stored, offset=at, shape=(end - begin, outer)), *places, fmt, True)


def load(piece: QuantizedRows) -> None:
    """Reads and quantizes a piece in the calling thread."""
    values = torch.empty(piece.stored.shape, dtype=piece.stored.dtype)
    read_here(piece.stored, values)
    if not piece.turned:
        quantize_into(values, piece.codes[0], piece.scales[0], piece.format)
        return
    fmt, rows = piece.format, values.T.contiguous()
    whole = Quantized.of(torch.empty(fmt.nbytes(rows.numel()), dtype=torch.uint8), rows.numel(), fmt)
    whole.write(rows)
    piece.codes.copy_(whole.codes.view(piece.codes.shape))
    piece.scales.copy_(whole.scales.view(piece.scales.shape))


def loading_bytes(spec: ModelShape) -> int:
    """Upper bound of a thread's temporary memory while it quantizes a model's weights; 0 if none are quantized."""
    return QUANTIZING if any(unit.quantized for unit in spec.units) else 0


def as_stored(blocks: Stored, scales: Stored, target: Quantized) -> list[tuple[Stored, Tensor]]:
    """Reads for tensors that a checkpoint stores in MXFP4, which stay as they are."""
    return [(blocks, target.codes.view(blocks.shape)), (scales, target.scales.view(scales.shape))]
