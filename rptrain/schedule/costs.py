"""What a layer costs: its work in operations and bytes, and its times and sizes as plans need them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """One pass of a layer over a micro-batch, by what limits it: operations by kind, and bytes.

    A multiplication and an addition are two operations.
    """

    matmul: float = 0.0  # operations of dense products with weights
    grouped: float = 0.0  # of products with the weights of experts
    attention: float = 0.0  # of scores and of their product with the values
    elementwise: Mapping[str, float] = field(default_factory=dict)  # bytes read and written on the device, by operation

    @property
    def traffic(self) -> float:
        """Bytes of all elementwise operations."""
        return sum(self.elementwise.values())

    @property
    def flops(self) -> float:
        return self.matmul + self.grouped + self.attention

    def without(self, other: "Work") -> "Work":
        """What is left where the products of `other` are left out."""
        return Work(
            self.matmul - other.matmul, self.grouped - other.grouped, self.attention - other.attention, self.elementwise
        )

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matmul + other.matmul,
            self.grouped + other.grouped,
            self.attention + other.attention,
            {
                name: self.elementwise.get(name, 0.0) + other.elementwise.get(name, 0.0)
                for name in {**self.elementwise, **other.elementwise}
            },
        )


def scaled(elements: Mapping[str, float], factor: float) -> dict[str, float]:
    """Bytes by operation, of elements a token."""
    return {name: factor * count for name, count in elements.items()}


@dataclass(frozen=True)
class LayerCost:
    """Times of a layer for one micro-batch, in seconds (or any one unit), and its sizes in bytes.

    `backward` includes the recomputed forward; for the head, which is computed forward and backward at once, it is
    both together, and `forward` a part of it that no forward stage has.
    """

    forward: float
    backward: float
    params: int = 0  # uploaded for each stage that holds the layer
    grads: int = 0  # of what is trained, downloaded after each backward stage
    kept: int = 0  # on the device from the recomputed forward to backward
    update: float = 0.0  # seconds of the CPU optimizer, once a step
    sums: int = 0  # what gradients accumulate in on the device, uploaded for each backward stage of a later round
    dequantized: int = 0  # on the device beside `params`, of what is uploaded in 4 or 8 bits
