"""A mixture of experts, the feed-forward part of a block: computation and costs.

Values are rounded where Hugging Face's modelling code rounds them, except that a token's experts are added in the wide
type. Suffixes as in models/layer.py; X experts of a token, N = T * X routed rows, sorted by expert. Backward
overwrites gate_up, as in models/layers/mlp.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.fp8 import Form, Operand
from rptrain.kernels.grouped import grouped_bias_grad, grouped_weight_grad
from rptrain.kernels.linear import linear, plain
from rptrain.kernels.moe_rows import combine, gather, router_weight_grad
from rptrain.kernels.swiglu import Clamp, swiglu, swiglu_backward
from rptrain.models.layers.expert_product import ExpertProduct
from rptrain.models.layers.mlp import SharedMLP, SharedSaved
from rptrain.models.layers.product import Product, times_
from rptrain.models.layers.router import Router, Routing
from rptrain.models.params import Grads, Params
from rptrain.schedule.costs import Work, scaled
from rptrain.schedule.roofline import Sizes


class MoESaved(NamedTuple):
    normed: Tensor  # [T, D], the input
    routing: Routing
    gate_up: Tensor  # [N, 2I]; backward computes its activation again
    shared: SharedSaved | None  # its input is `normed` as the shared MLP reads it


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Experts, gated MLPs of I columns, of which each token goes through some: a FeedForward (models/layers/block.py).

    Parameters: those of the router and of the shared MLP, experts_gate_up [2IE, D] and experts_down [DE, I], or, of
    GPT-OSS, [E, D, 2I] and [E, I, D]; with biases experts_gate_up_bias [E, 2I] and experts_down_bias [E, D].
    """

    router: Router
    gate_up: ExpertProduct
    down: ExpertProduct
    shared: SharedMLP | None = None  # all tokens go through it in addition
    clamp: Clamp | None = None  # GPT-OSS's activation, of gates and ups that alternate

    @classmethod
    def of(cls, hidden: int, intermediate: int, router: Router, *, bias: bool = False, **options: Any) -> Self:
        """`bias`: of the experts. `options`: the other fields."""
        routed: dict[str, Any] = {"experts": router.experts, "active": router.active, "bias": bias}
        gate_up, down = {"inputs": hidden, "outputs": 2 * intermediate}, {"inputs": intermediate, "outputs": hidden}
        return cls(
            router=router,
            # the activation and its gradient are freed before the product
            gate_up=ExpertProduct(name="experts_gate_up", **gate_up, **routed, gathers=True, freed=2 * intermediate),
            down=ExpertProduct(name="experts_down", **down, **routed),
            **options,
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return () if self.shared is None else self.shared.products

    @property
    def expert_products(self) -> tuple[ExpertProduct, ...]:
        return self.gate_up, self.down

    def with_products(self, change: Callable[[Any], Any]) -> Self:
        shared = self.shared and self.shared.with_products(change)
        return replace(self, gate_up=change(self.gate_up), down=change(self.down), shared=shared)

    def with_balance(self, coefficient: float) -> Self:
        return replace(self, router=replace(self.router, balance=coefficient))

    def with_half_sums(self) -> Self:
        shared = self.shared and self.shared.with_products(lambda product: replace(product, half_sums=True))
        return replace(self, router=replace(self.router, half_sums=True), shared=shared)

    def form(self, p: Params) -> Form:
        return Form.PLAIN

    def inner(self, p: Params, x: Operand, mb: MicroBatch | None) -> MoESaved:
        normed = plain(x)
        routing = self.router.forward(p, normed)
        rows = self.gate_up.gathered(p, normed, routing.perm)
        gate_up = self.gate_up.forward(p, rows, routing.perm.ends, normed.dtype)
        del rows
        return MoESaved(normed, routing, gate_up, self.shared and self.shared.inner(p, normed, mb))

    def output(self, p: Params, saved: MoESaved, mb: MicroBatch | None) -> Tensor:
        total = self._routed_output(p, saved)
        if self.shared is None or saved.shared is None:
            return total
        return self.shared.add(p, saved.shared, total, mb, 1.0)

    def add(
        self, p: Params, saved: MoESaved, residual: Tensor, mb: MicroBatch | None, scale: float, overwrite: bool
    ) -> Tensor:
        total = times_(self._routed_output(p, saved), scale).add_(residual)
        if self.shared is None or saved.shared is None:
            return total
        return self.shared.add(p, saved.shared, total, mb, scale)

    def backward(self, p: Params, g: Grads, saved: MoESaved, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        perm = saved.routing.perm
        dweights, dgate_up = self._down_backward(p, g, saved, dy_TD)

        drows, of_rows = self.gate_up.backward_input(p, dgate_up, perm.ends)
        dnormed = combine(drows, perm)
        del drows
        if of_rows.dh is not None or self.gate_up.name in g:
            rows = self.gate_up.gathered(p, saved.normed, perm)
            self.gate_up.backward_weights(p, g, of_rows, rows, perm.ends)
            del rows
        grouped_bias_grad(g.get(f"{self.gate_up.name}_bias"), dgate_up, perm.ends)

        dlogits = self.router.backward(saved.routing, dweights, mb)
        self.router.logits_backward(p, g, dlogits, saved.normed, dnormed)
        if self.shared is not None and saved.shared is not None:
            dnormed += self.shared.backward(p, g, saved.shared, saved.normed, dy_TD, mb)
        return dnormed

    def _routed_output(self, p: Params, saved: MoESaved) -> Tensor:
        """The sum [T, D] of what each token's experts make of it, times their weights."""
        activation = swiglu(saved.gate_up, **self._form)
        routing = saved.routing
        outputs = self.down.forward(p, activation, routing.perm.ends, activation.dtype)
        return combine(outputs, routing.perm, routing.weights)

    def _down_backward(self, p: Params, g: Grads, saved: MoESaved, dy_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the experts' weights [T, X] and, written over it, of gate_up; adds those after it to `g`.

        The experts' outputs are not recomputed: kernels/moe_rows.py, `router_weight_grad`.
        """
        _, choice, weights, perm = saved.routing
        drows = gather(dy_TD, perm)
        dactivation, of_rows = self.down.backward_input(p, drows, perm.ends)
        activation = swiglu(saved.gate_up, **self._form)
        dweights = router_weight_grad(dactivation, activation, perm, weights)
        self.down.backward_weights(p, g, of_rows, activation, perm.ends)
        bias = f"{self.down.name}_bias"
        if bias in g:  # a row's output has the bias as often as its weight says
            by_row = weights.flatten().index_select(0, perm.order).unsqueeze(1)
            grouped_weight_grad(g[bias].unsqueeze(1), by_row, drows, perm.ends)
        if self.down.bias:
            dweights += linear(dy_TD, p[bias]).gather(1, choice.long())
        del drows, of_rows, activation
        return dweights, swiglu_backward(dactivation, saved.gate_up, saved.gate_up, **self._form)

    @property
    def _form(self) -> dict[str, Any]:
        return {"interleaved": self.clamp is not None, "clamp": self.clamp}

    @property
    def reads_codes(self) -> bool:
        return False  # the router reads the values

    def work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """Its work without that of `products` and `expert_products`.

        Forward gathers the tokens and combines what the experts make of them. Backward gathers the gradients and the
        tokens, and combines the gradients. The gradients of experts' weights are operands.
        """
        router, hidden = self.router, self.gate_up.inputs
        logits = 2.0 * tokens * hidden * router.experts
        rows = hidden + router.active * hidden  # gathered or combined
        gathered = rows / itemsize if self.gate_up.gathers_codes else rows
        activation = router.active * self.down.inputs
        forward = {"router": router.experts, "gather": gathered, "activation": 3 * activation, "combination": rows}
        # the activation is computed again, and multiplied by the experts' weights together with its gradient
        backward = {"router, backward": 2 * router.experts, "gather": rows + gathered, "activation": 3 * activation}
        backward |= {"weights, backward": 4 * activation, "activation, backward": 5 * activation, "combination": rows}
        if self.shared is not None:
            shared, gated = self.shared.intermediate, self.shared.gated
            forward |= {"shared activation": 3 * shared, "shared sum": (1 + 4 * gated) * hidden}
            # with a gate the activation is computed again, and multiplied by the shares together with its gradient
            backward |= {"shared activation, backward": (6 + 6 * gated) * shared}
            backward |= {"shared sum, backward": (3 + 3 * gated) * hidden}
        return (
            Work(matmul=logits, elementwise=scaled(forward, tokens * itemsize)),
            # with biases, the weights' gradient also has the product of those of `down` with the gradient
            Work(matmul=(2 + self.down.bias) * logits, elementwise=scaled(backward, tokens * itemsize)),
        )

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        elements, codes = self.router.active * self.gate_up.outputs, 0
        if self.shared is not None:
            elements += 2 * self.shared.intermediate + self.shared.gated
            codes = self.gate_up.inputs + 4 if self.shared.gate_up.reads_codes else 0
        return tokens * (itemsize * elements + codes) + self.router.kept_bytes(tokens, itemsize)

    def workspace(self, itemsize: int) -> tuple[int, int]:
        wide, router, hidden = max(itemsize, 4), self.router, self.gate_up.inputs
        activation = router.active * self.down.inputs
        shared, of_shared = (0, 0) if self.shared is None else (self.shared.intermediate, self.shared.backward_columns)
        routing = router.active * (wide + 24)  # the gradient of the weights; rows' numbers, wide
        # the gradients of the routed rows and of their activation, with the activation; the gradient of a token
        between = itemsize * (router.active * hidden + 2 * activation + hidden) + routing
        # behind the experts: the input of a router in the wide type, and its gradient; or the shared MLP
        behind = max(wide * 2 * (hidden + router.experts) if router.wide else 0, itemsize * of_shared)
        between = max(between, itemsize * hidden + behind)
        # SwiGLU, a norm, the router's softmax, the operands of one expert's products
        product = hidden + self.gate_up.outputs
        return between, wide * max(3 * activation, 3 * shared, 5 * hidden, 3 * router.experts, product)

    def sized(self, mixer: Sizes) -> Sizes:
        router = self.router
        return replace(mixer, intermediate=self.down.inputs, experts=router.experts, active=router.active)
