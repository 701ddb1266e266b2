"""Large steps are simulated in few parts, and look and take as if all micro-batches were simulated."""

from dataclasses import replace

import pytest

from rptrain.schedule.coarse import PARTS, coarse, parts
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import Links, dispatch
from rptrain.schedule.estimate import Setting, estimate
from rptrain.schedule.picture import text
from rptrain.schedule.plan import Plan
from rptrain.schedule.roofline import judge
from rptrain.schedule.simulate import COMPUTATION, simulate

COSTS = [LayerCost(1, 3.3, params=4, grads=4, sums=4, update=9)] * 5 + [LayerCost(0, 2.6, params=4, grads=4, update=9)]
LINKS = Links(up=4, down=5, boundary=2, latency=0.01)
STAGES = "F0-0 F1-3 FB4-5 B2-3 B0-1"


def slots(plan, weights, lag, links):
    """The first start and the last end of each slot."""
    program = dispatch(plan, COSTS, links=links, lag=lag, iterations=1 + lag, weights=weights)
    timeline, found = simulate(program), {}
    for task, start, end in zip(program.tasks, timeline.starts, timeline.ends, strict=True):
        if task.kind in COMPUTATION:
            key = task.iteration, task.round, task.kind, task.layers
            first, last = found.get(key, (start, end))
            found[key] = min(first, start), max(last, end)
    return timeline, found


@pytest.mark.parametrize("count", [1, 2, PARTS, PARTS + 1, 511, 1000, 100_003])
def test_parts_make_up_a_round(count):
    found = parts(count)
    assert sum(found) == count and len(found) <= PARTS
    assert found[0] == found[-1] == 1 and all(one <= 2 * sum(found[:i]) for i, one in enumerate(found) if i)
    assert count > PARTS or set(found) == {1}


@pytest.mark.parametrize("links", [None, LINKS], ids=["computation", "copies"])
@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
def test_slots_begin_and_end_as_in_the_whole_step(lag, links):
    plan = Plan.parse(f"{STAGES} | N=3 M=600 MR=600")
    short = coarse(plan, COSTS)
    assert (short.factor, short.note) == (1, "") and short.plan.micro_batches <= PARTS
    (whole, exact), (quick, found) = slots(plan, None, lag, links), slots(short.plan, short.weights, lag, links)
    for key, times in exact.items():
        assert found[key] == pytest.approx(times, abs=0.006 * whole.makespan), key
    drawn, expected = (text(one).splitlines()[:3] for one in (quick, whole))
    different = sum(a != b for one, other in zip(drawn, expected, strict=True) for a, b in zip(one, other, strict=True))
    assert different <= 3 * 8, "cuts move by a character at most, and bubbles in the last digit"


def test_ordinary_steps_stay_whole():
    for plan in (f"{STAGES} | N=2 M=256 MR=256", f"{STAGES} | N=2 M=64 MR=1", f"{STAGES} | N=4 M=512 MR=128 R=4"):
        short = coarse(Plan.parse(plan), COSTS)
        assert short.plan == Plan.parse(plan) and short.costs == tuple(COSTS) and set(short.weights) == {1}


def test_few_rounds_of_many_are_shown():
    short = coarse(Plan.parse(f"{STAGES} | N=4 M=100000 MR=10 R=2"), COSTS)
    assert short.plan.rounds < 100 and short.note == f"the first {short.plan.rounds} of 10,000 rounds"


@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
def test_many_rounds_take_as_long_as_all_of_them(monkeypatch, lag):
    """By the estimate, and by the simulation that finds what limits a step."""
    plan = Plan.parse(f"{STAGES} | N=3 M=96 MR=2")
    setting = Setting(3, 96, 2, lag, LINKS)
    whole, exact = estimate(COSTS, plan.stages, setting), judge(plan, COSTS, setting)
    monkeypatch.setattr("rptrain.schedule.estimate.MOST_TURNS", 12)
    monkeypatch.setattr("rptrain.schedule.coarse.MOST_TURNS", 12)
    quick, judged = estimate(COSTS, plan.stages, setting), judge(plan, COSTS, setting)
    assert quick.period == pytest.approx(whole.period, rel=0.02)
    assert judged.seconds == pytest.approx(exact.seconds, rel=0.02) and judged.limit == exact.limit
    assert replace(judged, seconds=0, alone=0, loss=0) == replace(exact, seconds=0, alone=0, loss=0)
