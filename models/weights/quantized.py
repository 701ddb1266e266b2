"""A frozen base in 4 or 8 bits: the choice of matrices, and quantization of a checkpoint's tensors.

Bytes per weight: NF4 0.5 + 4 / 64 = 0.5625, MXFP4 0.5 + 1 / 32 = 0.53, int8 1 + 4 / 128 = 1.03, FP8 1 + 4 / inputs. A
block of NF4 and of int8 is consecutive elements of a checkpoint's tensor; a block of MXFP4 is consecutive inputs of one
output, and a block of FP8 all of its inputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.quant import MXFP4, Format, Quantized, format_of, quantize_into
from rptrain.models.params import Param
from rptrain.models.spec import ModelShape
from rptrain.models.transforms.freeze import Shape
from rptrain.models.weights.safetensors_io import Stored, read_here
from rptrain.utils.errors import UserError

READ = 1 << 20  # bytes that a thread reads and quantizes at a time, if a block or a row of blocks has no more
CHUNK_NUMEL = 1 << 18  # elements of rows that a thread dequantizes at a time
QUANTIZING = 6 * READ  # upper bound of a thread's temporary memory: data, its transpose, and PyTorch's chunks


def with_base(spec: Shape, base: str) -> Shape:
    """The model with the matrices of its layers' frozen units in the format `base`; "bf16": unchanged.

    Routers, which are small and sensitive, are not quantized. Experts that checkpoints may store in MXFP4 stay in MXFP4
    with any format; with "mxfp4" nothing else is quantized then, as in the published model. Matrices whose tensors do
    not consist of whole blocks are not quantized. Raises UserError if no matrix can be quantized.
    """
    if base == "bf16":
        return spec
    published = any(part.mxfp4 for unit in spec.units for param in unit.params for part in param.parts)
    chosen = None if published and base == MXFP4.name else base
    inside = {unit for layer in spec.layers for unit in layer.units} & {*spec.frozen}
    matrices = {name for layer in spec.layers for name in layer.matrices}

    def held(param: Param) -> Param:
        return _held(param, chosen) if param.name in matrices else param

    units = tuple(
        replace(unit, params=tuple(map(held, unit.params))) if index in inside else unit
        for index, unit in enumerate(spec.units)
    )
    if not any(unit.quantized for unit in units):
        raise UserError(f'lora.base: no matrix of this model consists of whole blocks of {base}; use "bf16"')
    return replace(spec, units=units)


def base_of(spec: ModelShape) -> str:
    """The `base` of `with_base` that made this model; "bf16" if nothing is quantized."""
    found = {param.format.name for index in spec.frozen for param in spec.units[index].quantized if param.format}
    return next(iter(found - {MXFP4.name}), MXFP4.name if found else "bf16")


def _held(param: Param, base: str | None) -> Param:
    if any(part.mxfp4 for part in param.parts):
        base = MXFP4.name
    if base is None:
        return param
    fmt = format_of(base, param.matrices[-1])
    held = replace(param, format=fmt)
    inputs = param.shape[1] if held.transposed else param.shape[-1]
    each = [inputs] if fmt is MXFP4 else [part.rows * prod(param.shape[1:]) for part in param.parts]
    return param if any(numel % fmt.block for numel in each) else held


def readable(spec: ModelShape, held: Callable[[int, str], Tensor | Quantized]) -> Callable[[int, str], Tensor]:
    """The parameters as they are held; quantized ones as dequantized copies in the dtype of the others."""

    def view(index: int, name: str) -> Tensor:
        found = held(index, name)
        if not isinstance(found, Quantized):
            return found
        embed = held(0, spec.units[0].params[0].name)
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
            held = target.part(begin, min(begin + most, target.numel))
            part = replace(stored, offset=stored.offset + begin * size, shape=(1, held.numel))
            yield QuantizedRows(part, held.codes[None], held.scales[None], fmt, False)
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
    held = Quantized.of(torch.empty(fmt.nbytes(rows.numel()), dtype=torch.uint8), rows.numel(), fmt)
    held.write(rows)
    piece.codes.copy_(held.codes.view(piece.codes.shape))
    piece.scales.copy_(held.scales.view(piece.scales.shape))


def loading_bytes(spec: ModelShape) -> int:
    """Upper bound of a thread's temporary memory while it quantizes a model's weights; 0 if none are quantized."""
    return QUANTIZING if any(unit.quantized for unit in spec.units) else 0


def as_stored(blocks: Stored, scales: Stored, target: Quantized) -> list[tuple[Stored, Tensor]]:
    """Reads for tensors that a checkpoint stores in MXFP4, which stay as they are."""
    return [(blocks, target.codes.view(blocks.shape)), (scales, target.scales.view(scales.shape))]
