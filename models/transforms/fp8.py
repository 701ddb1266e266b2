"""The choice of matrices that layers multiply with in FP8 (kernels/fp8.py)."""

from dataclasses import replace
from typing import Any, cast

from rptrain.kernels.fp8 import ALIGNMENT
from rptrain.models.layer import LayerShape
from rptrain.models.layers.adapters import PLACES
from rptrain.models.params import Param
from rptrain.models.transforms.freeze import Shape
from rptrain.models.transforms.names import EXPERTS
from rptrain.utils.errors import UserError


def with_fp8(spec: Shape) -> Shape:
    """The model with the products of its blocks in FP8: attention's projections, dense MLPs, and experts.

    Embedding, head, norms, routers and adapters stay as they are, and so do matrices with a size that is not a multiple
    of 16. Raises UserError if no matrix is left.
    """
    units = tuple(
        replace(unit, params=tuple(replace(param, in_fp8=_fits(param)) for param in unit.params)) for unit in spec.units
    )
    if not any(param.in_fp8 for unit in units for param in unit.params):
        raise UserError(
            f"engine.fp8: no matrix of this model's blocks has sizes that are multiples of {ALIGNMENT}; "
            "remove engine.fp8"
        )

    def layer_in_fp8(layer: LayerShape) -> Any:
        names = (param.name for unit in layer.units for param in units[unit].params if param.in_fp8)
        return replace(cast(Any, layer), fp8=tuple(names))

    return replace(spec, units=units, layers=tuple(map(layer_in_fp8, spec.layers)))


def _fits(param: Param) -> bool:
    if param.name not in (*PLACES, *EXPERTS):
        return False
    return all(size % ALIGNMENT == 0 for size in param.matrices[-2:])
