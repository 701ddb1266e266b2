"""The simulated step that a run records."""

from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from rptrain.planner.simulated_step import SHOWN, SHOWN_OF_MANY, simulated_step
from rptrain.runs.records.timeline import Schedule
from rptrain.schedule.dispatch import Links
from rptrain.schedule.plan import Plan

from ..schedule.plans import random_costs

STAGES = "F0-1 F2-3 FB4-4 B2-3 B0-1"


def simulated(plan: Plan, lag: int) -> Schedule:
    costs = random_costs(Random(1), 5, updates=(1,), params=8)
    run: Any = SimpleNamespace(plan=plan, costs=costs, setting=SimpleNamespace(lag=lag, links=Links(1e3, 1e3, 1)))
    schedule = simulated_step(run)
    assert schedule is not None
    return schedule


@pytest.mark.parametrize(
    "numbers", ["N=1 M=4 MR=4", "N=2 M=4 MR=4", "N=3 M=4 MR=2", "N=8 M=8 MR=4", "N=4 M=8 MR=2 R=2", "N=2 M=8 MR=2 R=4"]
)
def test_every_device_computes_the_slots_that_the_plan_gives_it(numbers: str):
    """In sync, where the windows have no slots of other steps; in each of the next iterations."""
    plan = Plan.parse(f"{STAGES} | {numbers}")
    schedule = simulated(plan, lag=0)
    assert schedule.stages == tuple(STAGES.split())
    for iteration in range(SHOWN, SHOWN + 6):
        step = schedule.at(iteration)
        for device, lane in enumerate(step.devices):
            own = {slot.index for slot in plan.slots(iteration) if slot.device == device}
            assert {block.slot for block in lane} == own


def test_in_async_the_neighbors_of_a_step_fill_its_window():
    plan = Plan.parse(f"{STAGES} | N=2 M=8 MR=8")
    sync, later = simulated(plan, lag=0).step, simulated(plan, lag=1).step
    assert later.seconds_per_step < sync.seconds_per_step and later.busy_share > sync.busy_share
    for step in (sync, later):
        assert all(0 <= block.start < block.end <= step.seconds for lane in step.devices for block in lane)
        assert all(one.end <= next.start + 1e-6 for lane in step.devices for one, next in pairwise(lane))


def test_steps_of_many_micro_batches_are_simulated_in_less_time_or_not_at_all():
    schedule = simulated(Plan.parse(f"{STAGES} | N=2 M=480 MR=8"), lag=1)
    assert schedule.step.iteration == SHOWN_OF_MANY and schedule.step.busy_share > 0.9
    for numbers in ("N=2 M=4096 MR=8", "N=1 M=600 MR=1"):  # many micro-batches; many slots
        too_many: Any = SimpleNamespace(plan=Plan.parse(f"{STAGES} | {numbers}"))
        assert simulated_step(too_many) is None
