"""The shape of a decoder block whose MLP is a mixture of experts: sizes and costs, no computation."""

from dataclasses import dataclass

from rptrain.models.block import BlockShape, scaled
from rptrain.models.hf_config import Sizes
from rptrain.plan.costs import Work


@dataclass(frozen=True, kw_only=True)
class MoEBlock(BlockShape):
    """A block that sends each token to `active` of its experts, gated MLPs of `intermediate` columns.

    Backward keeps the router's probabilities, each token's choice with its weights and places, and the product
    gate_up of the routed tokens. It gathers the experts' inputs again and computes their activation again.
    """

    experts: int
    active: int
    window: int | None = None  # keys that a query sees at most, itself included

    def attended(self, length: int) -> float:
        seen = length if self.window is None else min(length, self.window)
        return seen * (2 * length - seen + 1) / (2 * length)

    def mlp_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """In traffic also: the weights of experts that tokens may reach, tokens gathered by expert and combined.

        Forward gathers the tokens and adds what the experts make of them to the residual. Backward gathers the
        gradients and the tokens, and combines the gradients. The gradients of experts' weights are operands.
        """
        router = 2.0 * tokens * self.hidden * self.experts
        grouped = 6.0 * tokens * self.active * self.hidden * self.intermediate
        touched = min(self.experts, tokens * self.active)
        weights = touched * 3 * self.hidden * self.intermediate * itemsize
        routed = self.active * self.hidden
        gather = self.hidden + routed
        activation = self.active * self.intermediate
        forward = {"router": self.experts, "gather": gather, "activation": 3 * activation}
        forward["combination and sum"] = routed + 2 * self.hidden
        backward = {"router, backward": 2 * self.experts, "gather": 2 * gather, "activation, backward": 6 * activation}
        backward |= {"combination": gather, "norm and sum, backward": 4 * self.hidden}
        ahead, back = (
            {**scaled(elements, tokens * itemsize), "experts' weights": weights} for elements in (forward, backward)
        )
        return (
            Work(matmul=router, grouped=grouped, elementwise=ahead),
            Work(matmul=2 * router, grouped=2 * grouped, elementwise=back),
        )

    def mlp_kept(self, itemsize: int) -> int:
        wide = max(itemsize, 4)
        choice = self.active * (wide + 8 + 8)  # the weight, the expert and the place among the routed tokens
        routed = self.active * 2 * self.intermediate
        return itemsize * (2 * self.hidden + routed) + wide * (1 + self.experts) + choice

    def mlp_workspace(self, itemsize: int) -> tuple[int, int]:
        routed = self.active * (self.hidden + 3 * self.intermediate)
        # SwiGLU and its products with the sum of the routed gradients, a norm, the router's softmax
        inside = max(3 * self.active * self.intermediate + self.hidden, 5 * self.hidden, 3 * self.experts)
        return itemsize * (2 * self.hidden + routed), max(itemsize, 4) * inside


def moe_block(
    sizes: Sizes,
    index: int,
    *,
    intermediate: int,
    experts: int,
    active: int,
    qk_norm: bool = False,
    window: int | None = None,
) -> MoEBlock:
    """Block `index` of a decoder of these sizes; `intermediate` is that of one expert."""
    return MoEBlock(
        name=f"layers.{index}",
        unit=index + 1,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        intermediate=intermediate,
        qk_norm=qk_norm,
        experts=experts,
        active=active,
        window=window,
    )
