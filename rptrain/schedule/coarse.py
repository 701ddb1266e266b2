"""Programs of large steps that are quick to simulate, however many micro-batches and rounds a step has.

Neighbors among the micro-batches of a round are merged, and the step has only its first rounds: all others repeat them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.plan import Plan

PARTS = 256  # of a round, at most: each is then less than a hundredth of it
MOST = 512  # parts of a step, at most, beyond TURNS rounds of each group
TURNS = 3  # the first round of a group, and two that begin with partial sums
MOST_TURNS = 64  # rounds of each group


@dataclass(frozen=True)
class Coarse:
    """A plan whose step is `factor` times shorter, with its costs. `weights`: micro-batches in each part of a round."""

    plan: Plan
    costs: tuple[LayerCost, ...]
    weights: tuple[int, ...]
    factor: float

    @property
    def note(self) -> str:
        """What is shown, if it is not a whole step."""
        return "" if self.factor == 1 else f"the first {self.plan.rounds:,} of {self.rounds:,} rounds"

    @property
    def rounds(self) -> int:
        """Rounds of the whole step."""
        return round(self.plan.rounds * self.factor)


def coarse(plan: Plan, costs: Sequence[LayerCost]) -> Coarse:
    """The plan itself, unless it has many micro-batches.

    The update takes the same share of a step with fewer rounds.
    """
    weights = parts(plan.round_size)
    at_once = len(weights) * plan.replicas
    turns = min(plan.turns, max(TURNS, min(MOST // at_once, MOST_TURNS)))
    factor = plan.turns / turns
    plan = replace(plan, micro_batches=turns * at_once, round_size=len(weights))
    return Coarse(plan, tuple(shortened(costs, factor)), weights, factor)


def shortened(costs: Sequence[LayerCost], factor: float) -> Sequence[LayerCost]:
    """Costs whose times per step, and not per micro-batch, are `factor` times shorter."""
    if factor == 1:
        return costs
    per_step = ("update", "add", "reduce", "gather")
    return [replace(cost, **{name: getattr(cost, name) / factor for name in per_step}) for cost in costs]


def parts(count: int) -> tuple[int, ...]:
    """The micro-batches in each part of a round, which are at most PARTS.

    Slots begin and end with single micro-batches: with their times, stages begin and end when they do in the whole
    round (see `estimate`). Parts grow from both ends to the middle, so that none waits for a larger one before it.
    """
    if count <= PARTS:
        return (1,) * count
    most = ceil(2 * count / PARTS)
    ramp = [1, *(1 << power for power in range(most.bit_length()) if 1 << power < most)]
    rest = count - 2 * sum(ramp)
    number = ceil(rest / most)
    middle = [rest * (i + 1) // number - rest * i // number for i in range(number)]
    return (*ramp, *middle, *reversed(ramp))
