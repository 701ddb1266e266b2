"""The costs of layers: operations and bytes, and the times and sizes that plans use."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Work:
    """The work of one pass of a layer over a micro-batch: operations by kind, and bytes.

    A multiplication and an addition count as two operations.
    """

    matmul: float = 0.0  # operations of dense products with weights
    fp8: float = 0.0  # operations of dense products with weights in FP8, which `matmul` does not include
    grouped: float = 0.0  # operations of products with the weights of experts
    attention: float = 0.0  # operations of attention in forward: scores and their product with the values
    attention_backward: float = 0.0  # operations of attention in backward, which `attention` does not include
    half: float = 0.0  # those of `matmul` that are summed in float16 (kernels/half.py)
    half_attention: float = 0.0  # those of `attention` that are summed in float16
    half_attention_backward: float = 0.0  # those of `attention_backward` that are summed in float16
    elementwise: Mapping[str, float] = field(default_factory=dict)  # bytes read and written on the device, by operation
    # bytes read and written to quantize and transpose operands of products in FP8, less those that codes save
    quantization: float = 0.0
    grouped_fp8: float = 0.0  # operations with weights of experts in FP8, which `grouped` does not include
    # operations of attention in addition to those of the scores that count: parts of tiles behind the mask, and what
    # the start and end of each row of tiles take
    edges: float = 0.0
    # bytes of the operands that products with the matrices of adapters read: they bound the time of these products
    low_rank: float = 0.0
    delta_rule: float = 0.0  # operations of the gated delta rule in forward
    delta_rule_backward: float = 0.0  # operations of the gated delta rule in backward

    @property
    def traffic(self) -> float:
        """Bytes of all elementwise operations."""
        return sum(self.elementwise.values())

    @property
    def flops(self) -> float:
        products = self.matmul + self.fp8 + self.grouped + self.grouped_fp8
        mixers = self.attention + self.attention_backward + self.delta_rule + self.delta_rule_backward
        return products + mixers

    def without(self, other: "Work") -> "Work":
        """The work without the products of `other`, and without what is quantized for them."""
        return replace(
            self,
            matmul=self.matmul - other.matmul,
            fp8=self.fp8 - other.fp8,
            grouped=self.grouped - other.grouped,
            attention=self.attention - other.attention,
            attention_backward=self.attention_backward - other.attention_backward,
            edges=self.edges - other.edges,
            half=self.half - other.half,
            half_attention=self.half_attention - other.half_attention,
            half_attention_backward=self.half_attention_backward - other.half_attention_backward,
            quantization=self.quantization - other.quantization,
            grouped_fp8=self.grouped_fp8 - other.grouped_fp8,
            delta_rule=self.delta_rule - other.delta_rule,
            delta_rule_backward=self.delta_rule_backward - other.delta_rule_backward,
        )

    def with_half_sums(self, kept: float = 0.0) -> "Work":
        """The work with its dense products, except `kept` operations of them, summed in float16."""
        return replace(self, half=self.matmul - kept)

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matmul + other.matmul,
            self.fp8 + other.fp8,
            self.grouped + other.grouped,
            self.attention + other.attention,
            self.attention_backward + other.attention_backward,
            self.half + other.half,
            self.half_attention + other.half_attention,
            self.half_attention_backward + other.half_attention_backward,
            {
                name: self.elementwise.get(name, 0.0) + other.elementwise.get(name, 0.0)
                for name in {**self.elementwise, **other.elementwise}
            },
            self.quantization + other.quantization,
            self.grouped_fp8 + other.grouped_fp8,
            self.edges + other.edges,
            self.low_rank + other.low_rank,
            self.delta_rule + other.delta_rule,
            self.delta_rule_backward + other.delta_rule_backward,
        )


def scaled(elements: Mapping[str, float], factor: float) -> dict[str, float]:
    """Bytes by operation, from elements per token."""
    return {name: factor * count for name, count in elements.items()}


@dataclass(frozen=True)
class LayerCost:
    """Times of a layer for one micro-batch, in seconds (or any other unit), and its sizes in bytes.

    `backward` includes the recomputed forward. The head computes forward and backward at once: its `backward` is both
    together, and its `forward` is the part of it that no forward stage computes.
    """

    forward: float
    backward: float
    params: int = 0  # uploaded for each stage that holds the layer
    grads: int = 0  # gradients, downloaded after each backward stage
    kept: int = 0  # activations on the device, from the recomputed forward to backward
    update: float = 0.0  # seconds of the CPU optimizer, once per step
    sums: int = 0  # gradient accumulators on the device, uploaded for each backward stage of a later round
    prepared: int = 0  # dequantized parameters, codes in FP8 or transposed codes on the device, in addition to `params`
    # Of several processes: seconds to add the gradients of the own groups, to exchange these sums with all processes,
    # and to exchange updated weights. Sums are complete before any update; weights are sent while others are updated.
    add: float = 0.0
    reduce: float = 0.0
    gather: float = 0.0

    @property
    def summation(self) -> float:
        """Seconds to sum its gradients over all processes."""
        return self.add + self.reduce

    @property
    def renewal(self) -> float:
        """Seconds by which the layer delays the end of the update and exchange of all weights."""
        return max(self.update, self.gather)

    @property
    def alone(self) -> "LayerCost":
        """The costs with an infinitely fast network."""
        return replace(self, reduce=0.0, gather=0.0)
