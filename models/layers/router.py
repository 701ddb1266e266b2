"""The router of a mixture of experts, forward and backward.

The number of rows of an expert is known only on the device, and nothing waits for it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rptrain.kernels.batch import MicroBatch
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
from rptrain.kernels.reference.dense import wide
from rptrain.models.params import Grads, Params


class Routing(NamedTuple):
    logits: Tensor  # [T, E]
    choice: Tensor  # int32 [T, X]
    weights: Tensor  # [T, X]
    perm: Permutation


@dataclass(frozen=True, kw_only=True)
class Router:
    """The choice of `active` experts for each token.

    Parameters: router [E, D]; with `bias` router_bias [E]; with sigmoids router_correction [E], which is frozen.
    """

    experts: int
    active: int
    scoring: Scoring
    groups: tuple[int, int] = (1, 1)  # of experts, and those whose experts a token may reach; with sigmoids
    wide: bool = False  # its logits are float32
    bias: bool = False
    half_sums: bool = False  # gradients of float16 weights are summed in float16: models/transforms/half_sums.py
    balance: float = 0.0  # of the auxiliary loss: models/transforms/balance.py
    balance_in_config: bool = True  # whether config.json can enable that loss, as in transformers

    def forward(self, p: Params, normed_TD: Tensor) -> Routing:
        logits = self._logits(p, normed_TD)
        choice = choose(self._choice_scores(p, logits), self.active)
        return Routing(logits, choice, route(logits, choice, self.scoring), permute(choice, self.experts))

    def backward(self, saved: Routing, dweights_TX: Tensor, mb: MicroBatch) -> Tensor:
        """The gradient of the logits [T, E], that of the auxiliary loss included."""
        return route_backward(dweights_TX, saved.logits, saved.choice, self.scoring, *self._balance(saved, mb))

    def logits_backward(self, p: Params, g: Grads, dlogits_TE: Tensor, normed_TD: Tensor, dnormed_TD: Tensor) -> None:
        """Accumulates the gradients of the parameters in `g`, and adds that of the input to `dnormed_TD`."""
        if self.wide:
            accumulate_weight_grad(g.get("router"), dlogits_TE, normed_TD.to(dlogits_TE.dtype))
            dnormed_TD += linear_backward_input(dlogits_TE, p["router"].to(dlogits_TE.dtype))
            return
        accumulate_weight_grad(g.get("router"), dlogits_TE, normed_TD, half_sums=self.half_sums)
        accumulate_bias_grad(g.get("router_bias"), dlogits_TE)
        linear_add(dlogits_TE, p["router"].t(), dnormed_TD, overwrite=True)

    def _logits(self, p: Params, normed_TD: Tensor) -> Tensor:
        if not self.wide:
            return linear(normed_TD, p["router"], p.get("router_bias"))
        dtype = wide(normed_TD.dtype)
        return linear(normed_TD.to(dtype), p["router"].to(dtype))

    def _choice_scores(self, p: Params, logits_TE: Tensor) -> Tensor:
        return choice_scores(logits_TE, p["router_correction"], *self.groups) if self.scoring.sigmoid else logits_TE

    def _balance(self, saved: Routing, mb: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """The auxiliary loss's gradient for the probabilities [E] of each counted token, and the counted tokens."""
        if not self.balance or mb.balance is None:
            return None, None
        counted, tokens, scale = mb.balance
        # as in transformers, the experts with the largest logits are counted, which corrections do not change
        choice = choose(saved.logits, self.active) if self.scoring.sigmoid else saved.choice
        counts = expert_counts(choice, self.experts, counted).to(scale.dtype)
        return balance_grad(counts, tokens, self.balance) * scale, counted

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Logits and weights, the choice, rows by expert and places; where the rows of each expert end."""
        wide_size = max(itemsize, 4)
        choice = self.active * ((wide_size if self.scoring.sigmoid else itemsize) + 3 * 4)
        return tokens * (choice + self.experts * (wide_size if self.wide else itemsize)) + 4 * self.experts
