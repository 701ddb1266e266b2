"""Float16 sums for the products of attention and of the head, and for gradients of weights (kernels/half.py)."""

from dataclasses import replace
from typing import Any, cast

from rptrain.models.layers.block import blocks
from rptrain.models.transforms.freeze import Shape


def with_half_sums(spec: Shape) -> Shape:
    """The model whose attention and head sum their products in float16, where kernels run that can.

    So do the gradients of float16 weights.
    """

    layers = tuple(block.with_half_sums() for block in blocks(spec))
    return replace(spec, layers=layers, head=replace(cast(Any, spec.head), half_sums=True))
