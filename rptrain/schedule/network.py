"""The rate of a network that hides the exchange of gradients and weights behind computation."""

from collections.abc import Sequence
from dataclasses import replace

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.estimate import Setting, estimate
from rptrain.schedule.plan import Stage
from rptrain.schedule.roofline import HIDDEN

PRECISION = 0.005  # relative


def hiding_rate(costs: Sequence[LayerCost], stages: Sequence[Stage], setting: Setting, rate: float) -> float | None:
    """The lowest rate at which a step takes at most HIDDEN longer than with an infinitely fast network.

    The costs are those of a network of `rate`, in any unit, in which the result is, too. None: nothing is exchanged.
    """
    if not any(cost.reduce or cost.gather for cost in costs):
        return None
    most = estimate([cost.alone for cost in costs], stages, setting).period * (1 + HIDDEN)

    def hides(factor: float) -> bool:
        faster = [replace(cost, reduce=cost.reduce / factor, gather=cost.gather / factor) for cost in costs]
        return estimate(faster, stages, setting).period <= most

    low = 1.0  # of the rate
    while hides(low):
        low /= 2
    while not hides(2 * low):
        low *= 2
    high = 2 * low
    while high > low * (1 + PRECISION):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if hides(middle) else (middle, high)
    return rate * high
