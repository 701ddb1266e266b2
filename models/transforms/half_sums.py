"""Float16 sums for the products of attention and of the head, and for gradients of weights (kernels/half.py)."""

from dataclasses import replace
from typing import Any, cast

from rptrain.models.layer import LayerShape
from rptrain.models.transforms.freeze import Shape


def with_half_sums(spec: Shape) -> Shape:
    """The model whose attention and head sum their products in float16, where kernels run that can.

    So do the gradients of float16 weights.
    """

    def summed(layer: LayerShape) -> Any:
        return replace(cast(Any, layer), half_sums=True)

    return replace(spec, layers=tuple(map(summed, spec.layers)), head=summed(spec.head))
