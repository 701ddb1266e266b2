"""A decoder block whose MLP is a mixture of experts, with explicit backward.

Values are rounded where Hugging Face's modelling code rounds them, except that a token's experts are added in the wide
type. Suffixes as in models/layer.py; X experts of a token, N = T * X routed rows, sorted by expert. The number of
rows of an expert is known only on the device, and nothing waits for it. Backward overwrites gate_up, as in
models/layers/mlp.py.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rptrain.kernels import fp8, grouped_fp8
from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.fp8 import Operand
from rptrain.kernels.grouped import grouped_bias_grad, grouped_mm, grouped_weight_grad
from rptrain.kernels.linear import (
    accumulate_bias_grad,
    accumulate_weight_grad,
    linear,
    linear_add,
    linear_backward_input,
)
from rptrain.kernels.moe import (
    Permutation,
    Scoring,
    balance_grad,
    choice_scores,
    choose,
    expert_counts,
    permute,
    route,
    route_backward,
)
from rptrain.kernels.moe_rows import combine, gather, router_weight_grad
from rptrain.kernels.reference.dense import wide
from rptrain.kernels.rms_norm import add_rms_norm, rms_norm_backward
from rptrain.kernels.swiglu import Clamp, swiglu, swiglu_backward, swiglu_operand
from rptrain.models.layers.attention import AttentionBlock, times, times_
from rptrain.models.layers.expert_adapters import ExpertAdapters
from rptrain.models.params import Grads, Param, Params
from rptrain.schedule.costs import Work, scaled


class MoESaved(NamedTuple):
    x: Tensor  # [T, D]
    rstd: Tensor  # [T]
    normed: Tensor  # [T, D]
    logits: Tensor  # [T, E], the router's
    choice: Tensor  # int32 [T, X]
    weights: Tensor  # [T, X]
    perm: Permutation
    gate_up: Tensor  # [N, 2I]; backward computes its activation again
    shared_input: Operand | None  # [T, D], `normed` as the shared MLP reads it
    shared_gate_up: Tensor | None  # [T, 2S]


@dataclass(frozen=True, kw_only=True)
class MoEBlock(AttentionBlock):
    """A block that routes each token to `active` of its experts, which are gated MLPs of `intermediate` columns.

    Its parameters: post_norm [D], router [E, D], experts_gate_up [2IE, D] and experts_down [DE, I], or, of GPT-OSS,
    [E, D, 2I] and [E, I, D]; with `biases`, router_bias [E], experts_gate_up_bias [E, 2I] and experts_down_bias [E, D];
    with sigmoids router_correction [E], which is frozen; with `shared` shared_gate_up [2S, D] and shared_down [D, S].
    """

    experts: int
    active: int
    scoring: Scoring
    groups: tuple[int, int] = (1, 1)  # of experts, and those whose experts a token may reach; with sigmoids
    wide_router: bool = False  # its logits are float32
    shared: int = 0  # columns of a gated MLP that all tokens go through in addition
    biases: bool = False  # of the router and the experts
    clamp: Clamp | None = None  # GPT-OSS's activation, of gates and ups that alternate
    balance: float = 0.0  # of the router's auxiliary loss: models/transforms/balance.py
    balance_in_config: bool = True  # whether config.json can enable that loss, as in transformers

    def mlp(self, p: Params, product: Tensor, x_TD: Tensor, mb: MicroBatch | None) -> MoESaved:
        h_TD, normed, rstd = add_rms_norm(product, x_TD, p["post_norm"], self.eps)
        logits = self._logits(p, normed)
        choice = choose(self._choice_scores(p, logits), self.active)
        weights = route(logits, choice, self.scoring)
        perm = permute(choice, self.experts)
        gate_up = self._experts(p, "experts_gate_up", self._inputs(p, normed, perm), perm.ends)
        shared_input, shared_gate_up = None, None
        if self.shared:
            shared_input = fp8.operand(normed, self.form(p, "shared_gate_up"))
            shared_gate_up = self.product(p, "shared_gate_up", shared_input, mb)
            shared_input = self.kept(shared_input)
        return MoESaved(h_TD, rstd, normed, logits, choice, weights, perm, gate_up, shared_input, shared_gate_up)

    def mlp_output(self, p: Params, saved: MoESaved, mb: MicroBatch | None, *, overwrite: bool = False) -> Tensor:
        activation = swiglu(saved.gate_up, **self._form)
        outputs = self._experts(p, "experts_down", activation, saved.perm.ends)
        total = times_(combine(outputs, saved.perm, saved.weights), self.output_scale).add_(saved.x)
        if saved.shared_gate_up is None:
            return total
        del outputs
        activation = swiglu_operand(saved.shared_gate_up, self.form(p, "shared_down"))
        return self.product_add(p, "shared_down", activation, total, mb, overwrite=True)

    def mlp_backward(self, p: Params, g: Grads, saved: MoESaved, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        perm, ends = saved.perm, saved.perm.ends
        dweights, dgate_up = self._experts_backward(p, g, saved, times(dy_TD, self.output_scale))

        drows, dh = self._experts_backward_input(p, "experts_gate_up", dgate_up, ends)
        dnormed = combine(drows, perm)
        del drows
        if dh is not None or "experts_gate_up" in g:
            inputs = self._inputs(p, saved.normed, perm)
            self._experts_backward_weights(p, g, "experts_gate_up", dgate_up, dh, inputs, ends)
            del inputs
        grouped_bias_grad(g.get("experts_gate_up_bias"), dgate_up, ends)

        dlogits = route_backward(dweights, saved.logits, saved.choice, self.scoring, *self._balance(saved, mb))
        self._router_backward(p, g, dlogits, saved.normed, dnormed)
        if saved.shared_input is not None and saved.shared_gate_up is not None:
            dnormed += self._shared_backward(p, g, saved.shared_input, saved.shared_gate_up, dy_TD, mb)
        return rms_norm_backward(dnormed, saved.x, p["post_norm"], saved.rstd, g.get("post_norm"), dy_TD)

    def _logits(self, p: Params, normed_TD: Tensor) -> Tensor:
        if not self.wide_router:
            return linear(normed_TD, p["router"], p.get("router_bias"))
        dtype = wide(normed_TD.dtype)
        return linear(normed_TD.to(dtype), p["router"].to(dtype))

    def _choice_scores(self, p: Params, logits_TE: Tensor) -> Tensor:
        return choice_scores(logits_TE, p["router_correction"], *self.groups) if self.scoring.sigmoid else logits_TE

    def _router_backward(self, p: Params, g: Grads, dlogits_TE: Tensor, normed_TD: Tensor, dnormed_TD: Tensor) -> None:
        """Accumulates the gradients of the router in `g`, and adds that of its input to `dnormed_TD`."""
        if self.wide_router:
            accumulate_weight_grad(g.get("router"), dlogits_TE, normed_TD.to(dlogits_TE.dtype))
            dnormed_TD += linear_backward_input(dlogits_TE, p["router"].to(dlogits_TE.dtype))
            return
        accumulate_weight_grad(g.get("router"), dlogits_TE, normed_TD, half_sums=self.half_sums)
        accumulate_bias_grad(g.get("router_bias"), dlogits_TE)
        linear_add(dlogits_TE, p["router"].t(), dnormed_TD, overwrite=True)

    def _shared_backward(
        self, p: Params, g: Grads, x: Operand, gate_up: Tensor, dy_TD: Tensor, mb: MicroBatch
    ) -> Tensor:
        """The gradient of the input of the shared MLP; overwrites gate_up."""
        dy_TD = times(dy_TD, self.output_scale)
        activation, passed = self.backward_input(p, "shared_down", dy_TD, mb)  # its gradient, until it is overwritten
        dgate_up = swiglu_backward(activation, gate_up, gate_up, activation)
        self.backward_weights(p, g, "shared_down", dy_TD, passed, activation, mb)
        del activation
        return self.product_backward(p, g, "shared_gate_up", dgate_up, x, mb)

    def _balance(self, saved: MoESaved, mb: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """The auxiliary loss's gradient for the probabilities [E] of each counted token, and the counted tokens."""
        if not self.balance or mb.balance is None:
            return None, None
        counted, tokens, scale = mb.balance
        # as in transformers, the experts with the largest logits are counted, which corrections do not change
        choice = choose(saved.logits, self.active) if self.scoring.sigmoid else saved.choice
        counts = expert_counts(choice, self.experts, counted).to(scale.dtype)
        return balance_grad(counts, tokens, self.balance) * scale, counted

    def _experts_backward(self, p: Params, g: Grads, saved: MoESaved, dy_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the experts' weights [T, X] and, written over it, of gate_up; adds those after it to `g`.

        The experts' outputs are not recomputed: kernels/moe_rows.py, `router_weight_grad`.
        """
        perm, ends = saved.perm, saved.perm.ends
        drows = gather(dy_TD, perm)
        dactivation, dh = self._experts_backward_input(p, "experts_down", drows, ends)
        activation = swiglu(saved.gate_up, **self._form)
        dweights = router_weight_grad(dactivation, activation, perm, saved.weights)
        self._experts_backward_weights(p, g, "experts_down", drows, dh, activation, ends)
        if "experts_down_bias" in g:  # a row's output has the bias as often as its weight says
            by_row = saved.weights.flatten().index_select(0, perm.order).unsqueeze(1)
            grouped_weight_grad(g["experts_down_bias"].unsqueeze(1), by_row, drows, ends)
        if self.biases:
            dweights += linear(dy_TD, p["experts_down_bias"]).gather(1, saved.choice.long())
        del drows, activation
        return dweights, swiglu_backward(dactivation, saved.gate_up, saved.gate_up, **self._form)

    def _inputs(self, p: Params, normed_TD: Tensor, perm: Permutation) -> Tensor | fp8.Rows:
        """The tokens' rows by expert; their codes in FP8, unless adapters or scales by expert need the values."""
        w = p["experts_gate_up"]
        if isinstance(w, Tensor) or w.by_input or self._expert_adapters("experts_gate_up"):
            return gather(normed_TD, perm)
        return grouped_fp8.gather_codes(fp8.quantize_rows(normed_TD), perm)

    def _experts(self, p: Params, name: str, x: Tensor | fp8.Rows, ends: Tensor) -> Tensor:
        """The rows of x times their experts' weights `name`, with bias and adapters, if any."""
        w, bias = p[name], p.get(f"{name}_bias")
        if isinstance(w, fp8.FP8Weight):
            y = grouped_fp8.grouped_mm(x, w, ends, bias, p["post_norm"].dtype)
        else:
            assert isinstance(x, Tensor)
            y = grouped_mm(x, self.whole(w), ends, bias)
        if adapters := self._expert_adapters(name):
            assert isinstance(x, Tensor)
            adapters.add(p, x, y, ends)
        return y

    def _experts_backward_input(self, p: Params, name: str, dy: Tensor, ends: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of such a product's input, and the inputs of its adapters' gradients."""
        w, adapters = p[name], self._expert_adapters(name)
        if isinstance(w, fp8.FP8Weight):
            dx = grouped_fp8.grouped_mm_transposed(dy, w, ends)
        else:
            dx = grouped_mm(dy, self.whole(w).mT, ends)
        return dx, adapters.backward_input(p, dy, dx, ends) if adapters else None

    def _experts_backward_weights(
        self, p: Params, g: Grads, name: str, dy: Tensor, dh: Tensor | None, x: Tensor | fp8.Rows, ends: Tensor
    ) -> None:
        if name in g and isinstance(w := p[name], fp8.FP8Weight):
            grouped_fp8.grouped_weight_grad(g[name].view(w.rows.codes.shape), x, dy, ends, by_input=w.by_input)
        elif name in g:
            assert isinstance(x, Tensor)
            grouped_weight_grad(self.whole(g[name]), x, dy, ends)
        adapters = self._expert_adapters(name)
        if adapters and dh is not None:
            assert isinstance(x, Tensor)
            adapters.backward_weights(p, g, dy, dh, x, ends)

    def _expert_adapters(self, name: str) -> ExpertAdapters | None:
        return next((each for each in self.adapters if isinstance(each, ExpertAdapters) and each.name == name), None)

    def whole(self, stored: Tensor) -> Tensor:
        """[E, in, out]: as GPT-OSS stores the experts, or a view of theirs stacked, [E * out, in]."""
        return stored if stored.dim() == 3 else stored.view(self.experts, -1, stored.shape[1]).mT

    @property
    def expert_sizes(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of an expert's products, by name."""
        gate_up, down = (self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)
        return {"experts_gate_up": gate_up, "experts_down": down}

    @property
    def product_sizes(self) -> dict[str, tuple[int, int]]:
        if not self.shared:
            return super().product_sizes
        shared = {"shared_gate_up": (self.hidden, 2 * self.shared), "shared_down": (self.shared, self.hidden)}
        return super().product_sizes | shared

    @property
    def _form(self) -> dict[str, Any]:
        return {"interleaved": self.clamp is not None, "clamp": self.clamp}

    def mlp_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """In traffic also: the weights of experts that tokens may reach, tokens gathered by expert and combined.

        Forward gathers the tokens and combines what the experts make of them. Backward gathers the gradients and the
        tokens, and combines the gradients. The gradients of experts' weights are operands.
        """
        router = 2.0 * tokens * self.hidden * self.experts
        ahead_products, back_products = self._grouped_work(tokens, itemsize)
        touched = min(self.experts, tokens * self.active)
        matrices = ((name, inputs * outputs) for name, (inputs, outputs) in self.expert_sizes.items())
        weights = touched * sum(size * (1 if name in self.fp8 else itemsize) for name, size in matrices)
        routed = self.active * self.hidden
        rows = self.hidden + routed  # gathered or combined
        gathered = rows / itemsize if self._gathers_codes else rows
        activation = self.active * self.intermediate
        forward = {"router": self.experts, "gather": gathered, "activation": 3 * activation}
        forward |= {"combination": rows, "sum": 3 * self.hidden}
        # the activation is computed again, and multiplied by the experts' weights together with its gradient
        backward = {"router, backward": 2 * self.experts, "gather": rows + gathered, "activation": 3 * activation}
        backward |= {"weights, backward": 4 * activation, "activation, backward": 5 * activation}
        backward |= {"combination": rows, "norm and sum, backward": 4 * self.hidden}
        if self.biases:
            backward["biases, backward"] = 2 * activation + routed
        if self.shared:
            forward["shared activation"], backward["shared activation, backward"] = 3 * self.shared, 6 * self.shared
            forward["shared sum"], backward["shared sum, backward"] = self.hidden, 3 * self.hidden
        ahead, back = (
            {**scaled(elements, tokens * itemsize), "experts' weights": weights} for elements in (forward, backward)
        )
        return (
            ahead_products + Work(matmul=router, elementwise=ahead),
            # with biases, the weights' gradient also has the product of those of `down` with the gradient
            back_products + Work(matmul=(2 + self.biases) * router, elementwise=back),
        )

    def _grouped_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The products of experts in forward and in backward; in FP8 operands are quantized for each product."""
        forward, backward, rows = Work(), Work(), tokens * self.active
        for name, (inputs, outputs) in self.expert_sizes.items():
            operations = 2.0 * rows * inputs * outputs
            if name not in self.fp8:
                forward, backward = forward + Work(grouped=operations), backward + Work(grouped=2 * operations)
                continue
            forward += Work(grouped_fp8=operations, quantization=self._input_bytes(name, tokens, itemsize))
            backward += Work(grouped_fp8=operations, quantization=rows * outputs * (itemsize + 1))
            backward += self._gradient_fp8(name, tokens, itemsize)
        return forward, backward

    def _gradient_fp8(self, name: str, tokens: int, itemsize: int) -> Work:
        """The gradient of experts' weights in FP8: codes of inputs are transposed, gradients of outputs read twice."""
        (inputs, outputs), rows = self.expert_sizes[name], tokens * self.active
        moved = self._input_bytes(name, tokens, itemsize) + rows * (2 * inputs + outputs * (2 * itemsize + 1))
        return Work(grouped_fp8=2.0 * rows * inputs * outputs, quantization=moved)

    def _input_bytes(self, name: str, tokens: int, itemsize: int) -> int:
        """Bytes read and written to quantize a product's input."""
        by_token = name == "experts_gate_up" and self._gathers_codes
        return tokens * (1 if by_token else self.active) * self.expert_sizes[name][0] * (itemsize + 1)

    @property
    def _gathers_codes(self) -> bool:
        """Whether tokens are quantized before their rows are gathered: see `_inputs`. GPT-OSS counts as without."""
        name = "experts_gate_up"
        return name in self.fp8 and not self.biases and not self._expert_adapters(name)

    def gradient_work(self, param: Param, tokens: int, itemsize: int) -> Work:
        """The gradient work of a parameter: each token reaches `active` experts; biases need no products."""
        if param.name in self.fp8 and param.name in self.expert_sizes:
            return self._gradient_fp8(param.name, tokens, itemsize)
        if param.name in self.expert_sizes:
            return Work(grouped=2.0 * tokens * param.numel * self.active / self.experts)
        if param.name.startswith("experts"):
            return Work()
        return super().gradient_work(param, tokens, itemsize)

    def mlp_kept(self, tokens: int, itemsize: int) -> int:
        wide = max(itemsize, 4)
        weight = wide if self.scoring.sigmoid else itemsize
        choice = self.active * (weight + 3 * 4)  # weight, expert, row and place
        routing = choice + self.experts * (wide if self.wide_router else itemsize)
        elements = 2 * self.hidden + self.active * 2 * self.intermediate + 2 * self.shared
        codes = self.hidden + 4 if self._reads_codes("shared_gate_up") else 0
        return tokens * (itemsize * elements + wide + routing + codes) + 4 * self.experts

    def mlp_workspace(self, itemsize: int) -> tuple[int, int]:
        wide = max(itemsize, 4)
        activation = self.active * self.intermediate
        routing = self.active * (wide + 24)  # the gradient of the weights; rows' numbers, wide
        # the gradients of the routed rows and of their activation, with the activation; the gradient of a token
        between = itemsize * (self.active * self.hidden + 2 * activation + self.hidden) + routing
        # behind the experts: the input of a router in the wide type, and its gradient; or the shared MLP
        router = wide * 2 * (self.hidden + self.experts) if self.wide_router else 0
        behind = max(router, itemsize * (self.hidden + 2 * self.shared))
        between = max(between, itemsize * self.hidden + behind)
        # SwiGLU, a norm, the router's softmax, the operands of one expert's products
        product = self.hidden + 2 * self.intermediate
        inside = max(3 * activation, 3 * self.shared, 5 * self.hidden, 3 * self.experts, product)
        return between, wide * inside

    def _fp8_workspace(self, tokens: int, itemsize: int, *, fused: bool) -> int:
        """Bytes in addition to those between operations.

        The activation and its gradient are freed before the products of gate_up.
        """
        rows = tokens * self.active
        freed = {"experts_gate_up": 2 * rows * self.intermediate * itemsize}
        needed = [super()._fp8_workspace(tokens, itemsize, fused=fused)]
        for name in (name for name in self.fp8 if name in self.expert_sizes):
            sizes = rows, self.experts, *self.expert_sizes[name]
            needed.append(grouped_fp8.workspace(*sizes, largest=tokens, fused=fused) - freed.get(name, 0))
        return max(needed)
