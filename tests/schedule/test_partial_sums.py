"""Sums of gradients in a simulation: they come back in every later round, and have their place on the device."""

import pytest
import torch

from rptrain.engine.footprint import footprint
from rptrain.models import registry
from rptrain.planner.choose import Workload, layer_costs
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import Links, dispatch
from rptrain.schedule.estimate import Setting, estimate
from rptrain.schedule.machine import CARDS, Machine
from rptrain.schedule.partition import partition
from rptrain.schedule.picture import svg, text
from rptrain.schedule.plan import Plan
from rptrain.schedule.simulate import Hold, simulate
from tests.schedule.test_dispatch import LINKS, SEEDS, Times, random_case


@pytest.mark.sample(12)
@SEEDS
def test_they_come_after_their_way_down_and_before_their_stage(seed):
    plan, costs, lag = random_case(seed, params=17)
    timeline = simulate(dispatch(plan, costs, links=LINKS, lag=lag, iterations=3))
    times = Times(plan, timeline)
    for iteration, slot, computed, _, _ in times.slots(3):
        if not slot.stage.backward:
            continue
        for layer in slot.stage.layers:
            if slot.turn == 0:
                assert (iteration, slot.round, layer) not in times.sums
                continue
            start, end = times.sums[iteration, slot.round, layer]
            assert end - start == pytest.approx(costs[layer].sums / LINKS.up)
            assert start >= max(end for _, end in times.grads[iteration, slot.round - plan.replicas, layer])
            assert end <= computed[0][0]


def test_by_hand_they_are_idle_time_and_held():
    """
    One device, one layer, two rounds of one micro-batch. Link up: inputs 0 to 1 and 1 to 2, parameters 2 to 12 and 12
    to 22. Compute: 12 to 32. Link down: output 32 to 33, gradients 33 to 53. The sums come up from 53 to 73, and the
    second round computes to 93. Most is held before 32: parameters of both, sums, two inputs, an output, and what is
    kept.
    """
    plan, costs = Plan.parse("FB0-0 | N=1 M=2 MR=1"), [LayerCost(0, 20, params=10, grads=20, kept=100, sums=20)]
    program = dispatch(plan, costs, links=Links(up=1, down=1, boundary=1, chunk=100, latency=0))
    timeline = simulate(program)
    place = {(task.kind, task.round): index for index, task in enumerate(program.tasks)}
    spans = {key: (timeline.starts[index], timeline.ends[index]) for key, index in place.items()}
    assert spans["FB", 0] == (12, 32) and spans["grads", 0] == (33, 53)
    assert spans["sums", 1] == (53, 73) and spans["FB", 1] == (73, 93)
    assert (timeline.makespan, timeline.busy(0), timeline.end_of(0)) == (93, 40, 93)
    assert timeline.bubble() == timeline.bubble(0) == pytest.approx(53 / 93)
    assert timeline.peak(0) == 2 * 10 + 20 + 2 * 1 + 1 + 100
    assert Hold(0, 20, place["sums", 1], place["grads", 1]) in program.holds


def test_without_links_they_take_no_time():
    plan = Plan.parse("F0-0 FB1-1 B0-0 | N=2 M=4 MR=2")
    program = dispatch(plan, [LayerCost(1, 3, 10, 10, sums=20)] * 2)
    assert not any(task.kind == "sums" for task in program.tasks)


def test_a_step_is_longer_by_the_time_that_they_take():
    """Each of two rounds computes 4 x 3 s for each of three stages on one device; the second loads 2 x 500 s first."""
    plan = Plan.parse("F0-0 FB1-1 B0-0 | N=1 M=8 MR=4")
    links, costs = Links(1, 1e9, 0, latency=0), [LayerCost(3, 3, sums=500), LayerCost(0, 3, sums=500)]
    timeline = simulate(dispatch(plan, costs, links=links, iterations=3))
    period = timeline.period(1, 2)
    found = estimate(costs, plan.stages, Setting(1, 8, 4, 0, links))
    assert period == pytest.approx(2 * 36 + 1000)
    assert found.period == pytest.approx(period)
    assert found.bubble == timeline.steady_bubble(1, 2) == pytest.approx(1 - 72 / period)


def test_gradients_wait_until_the_last_ones_were_read():
    """
    Async, one layer, an update of 100 s, which begins once the gradients are there. They go down when the update
    before is over, so steps are as far apart as updates. The second of two rounds, whose sums take 7 s to come up and
    which computes 10 s, begins only then, and the next update after it.
    """
    costs = [LayerCost(0, 5, params=1, grads=1, sums=7, update=100)]
    links = Links(up=1, down=1e9, boundary=0, latency=0)
    for rounds, expected in ((1, 100), (2, 100 + 7 + 10)):
        plan = Plan.parse(f"FB0-0 | N=1 M=4 MR={4 // rounds}")
        timeline = simulate(dispatch(plan, costs, links=links, lag=1, iterations=8))
        assert timeline.period(5, 7) == pytest.approx(expected)
        found = estimate(costs, plan.stages, Setting(1, 4, 4 // rounds, 1, links))
        assert found.period == pytest.approx(expected)


def test_pictures_show_them_as_idle_and_as_copies():
    plan, costs = Plan.parse("FB0-0 | N=1 M=2 MR=1"), [LayerCost(0, 20, params=10, grads=20, sums=20)]
    timeline = simulate(dispatch(plan, costs, links=Links(up=1, down=1, boundary=1, latency=0)))
    row = text(timeline, 103).splitlines()[0]
    assert row.count("·") == pytest.approx(93 * 53 / 93, abs=2)
    assert "partial sums up" in svg(timeline, "") and "sums0-0, iteration 0, round 1: 53 to 73 s" in svg(timeline, "")


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("round_size", [8, 4])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_simulated_peak_is_within_what_is_planned(dtype, round_size, devices, asynchronous):
    spec = registry.build(registry.read_config(registry.locate("qwen3-1.7b")))
    workload = Workload(1, 2048, 8, round_size, dtype, asynchronous)
    costs = layer_costs(spec, workload, Machine(CARDS["rtx4090"], devices), None)
    stages = partition(costs, devices, 8)
    assert stages is not None
    links = Links(20e9, 20e9, workload.tokens * spec.hidden_size * dtype.itemsize)
    program = dispatch(Plan(stages, devices, 8, round_size), costs, links=links, lag=int(asynchronous), iterations=3)
    timeline, planned = simulate(program), footprint(spec, stages, workload.shapes(devices))
    peaks = [timeline.peak(device) for device in range(devices)]
    assert max(peaks) <= planned.total
    assert max(peaks) >= planned.params / 2 + planned.sums / 2
