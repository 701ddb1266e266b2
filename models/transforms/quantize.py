"""A frozen base in 4 or 8 bits: which matrices are quantized.

Bytes per weight: NF4 0.5 + 4 / 64 = 0.5625, MXFP4 0.5 + 1 / 32 = 0.53, int8 1 + 4 / 128 = 1.03, FP8 1 + 4 / inputs. A
block of NF4 and of int8 is consecutive elements of a checkpoint's tensor; a block of MXFP4 is consecutive inputs of one
output, and a block of FP8 all of its inputs.
"""

from dataclasses import replace
from math import prod

from rptrain.kernels.quant import MXFP4, format_of
from rptrain.models.params import Param
from rptrain.models.spec import ModelShape
from rptrain.models.transforms.freeze import Shape
from rptrain.utils.errors import UserError


def with_base(spec: Shape, base: str) -> Shape:
    """The model with the matrices of its layers' frozen units in the format `base`; "bf16": unchanged.

    Routers and gates with one output, which are small and sensitive, are not quantized. Experts that checkpoints may
    store in MXFP4 stay in MXFP4 with any format; with "mxfp4" nothing else is quantized then, as in the published
    model. Matrices whose tensors do not consist of whole blocks are not quantized. Raises UserError if no matrix can be
    quantized.
    """
    if base == "bf16":
        return spec
    published = any(part.mxfp4 for unit in spec.units for param in unit.params for part in param.parts)
    chosen = None if published and base == MXFP4.name else base
    inside = {unit for layer in spec.layers for unit in layer.units} & {*spec.frozen}
    matrices = {name for layer in spec.layers for name in layer.matrices}

    def quantized(param: Param) -> Param:
        return _quantized(param, chosen) if param.name in matrices and param.numel > param.shape[-1] else param

    units = tuple(
        replace(unit, params=tuple(map(quantized, unit.params))) if index in inside else unit
        for index, unit in enumerate(spec.units)
    )
    if not any(unit.quantized for unit in units):
        raise UserError(f'lora.base: no matrix of this model consists of whole blocks of {base}; use "bf16"')
    return replace(spec, units=units)


def base_of(spec: ModelShape) -> str:
    """The `base` of `with_base` that made this model; "bf16" if nothing is quantized."""
    found = {param.format.name for index in spec.frozen for param in spec.units[index].quantized if param.format}
    return next(iter(found - {MXFP4.name}), MXFP4.name if found else "bf16")


def _quantized(param: Param, base: str | None) -> Param:
    if any(part.mxfp4 for part in param.parts):
        base = MXFP4.name
    if base is None:
        return param
    fmt = format_of(base, param.matrices[-1])
    made = replace(param, format=fmt)
    inputs = param.shape[1] if made.transposed else param.shape[-1]
    each = [inputs] if fmt is MXFP4 else [part.rows * prod(param.shape[1:]) for part in param.parts]
    return param if any(numel % fmt.block for numel in each) else made
