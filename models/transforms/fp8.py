"""The choice of matrices that layers multiply with in FP8 (kernels/fp8.py)."""

from dataclasses import replace

from rptrain.kernels.fp8 import ALIGNMENT
from rptrain.models.layers.block import Block, blocks
from rptrain.models.params import Param
from rptrain.models.transforms.freeze import Shape
from rptrain.utils.errors import UserError


def with_fp8(spec: Shape) -> Shape:
    """The model with the products of its blocks in FP8: attention's projections, dense MLPs, and experts.

    Embedding, head, norms, routers and adapters stay as they are, and so do matrices with a size that is not a multiple
    of 16. Raises UserError if no matrix is left.
    """
    matrices = {name for layer in spec.layers for name in layer.matrices}

    def marked(param: Param) -> Param:
        return replace(param, in_fp8=param.name in matrices and _fits(param))

    units = tuple(replace(unit, params=tuple(map(marked, unit.params))) for unit in spec.units)
    if not any(param.in_fp8 for unit in units for param in unit.params):
        raise UserError(
            f"engine.fp8: no matrix of this model's blocks has sizes that are multiples of {ALIGNMENT}; "
            "remove engine.fp8"
        )

    def block_in_fp8(block: Block) -> Block:
        names = {param.name for unit in block.units for param in units[unit].params if param.in_fp8}
        return block.with_products(lambda product: replace(product, in_fp8=product.name in names))

    return replace(spec, units=units, layers=tuple(map(block_in_fp8, blocks(spec))))


def _fits(param: Param) -> bool:
    return all(size % ALIGNMENT == 0 for size in param.matrices[-2:])
