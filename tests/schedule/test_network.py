"""The slowest network that computation hides."""

from dataclasses import replace

import pytest

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.estimate import Setting, estimate
from rptrain.schedule.network import hiding_rate
from rptrain.schedule.plan import Plan
from rptrain.schedule.roofline import HIDDEN

STAGES = Plan.parse("F0-2 FB3-3 B2-2 B1-1 B0-0 | N=1 M=8 MR=8").stages
SETTING = Setting(1, 8, 8, 1)


@pytest.mark.parametrize("given", [0.01, 1.0, 1000.0])
def test_it_is_the_same_from_any_rate_and_just_hides(given):
    costs = [LayerCost(1.0, 3.0, reduce=4 * 30.0, gather=2 * 30.0)] * 4  # at a rate of 1
    rate = hiding_rate([scaled(cost, given) for cost in costs], STAGES, SETTING, given)
    assert rate is not None

    def loss(rate):
        return estimate([scaled(cost, rate) for cost in costs], STAGES, SETTING).period / alone - 1

    alone = estimate([cost.alone for cost in costs], STAGES, SETTING).period
    assert alone == 8 * (3 + 4 * 3)
    assert loss(rate) <= HIDDEN < loss(rate * 0.99)
    assert rate >= 4 * 6 * 30 / (alone * (1 + HIDDEN))  # all messages fit into a step


def test_nothing_is_exchanged():
    assert hiding_rate([LayerCost(1.0, 3.0)] * 4, STAGES, SETTING, 1.0) is None


def scaled(cost, rate):
    return replace(cost, reduce=cost.reduce / rate, gather=cost.gather / rate)
