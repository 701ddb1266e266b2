"""The partitioner against brute force, and against memory."""

import itertools
import random

import pytest

from rptrain.plan.costs import LayerCost
from rptrain.plan.partition import partition
from rptrain.plan.schedule import Plan, Stage
from rptrain.plan.validate import validate


def compositions(total):
    """Every way to write `total` as an ordered sum of positive numbers."""
    for cuts in itertools.product([False, True], repeat=max(total - 1, 0)):
        parts, run = [], 1
        for cut in cuts:
            if cut:
                parts.append(run)
                run = 1
            else:
                run += 1
        yield [*parts, run] if total else []


def brute_force(costs, devices, micro_batches):
    """The least (M S + N (N - 1)) t_max over every partition."""
    best, layers = float("inf"), len(costs)
    for fused in range(1, layers + 1):
        body = layers - fused
        fused_time = sum(cost.backward for cost in costs[body:])
        for forward in compositions(body):
            for backward in compositions(body):
                times, start = [fused_time], 0
                for size in forward:
                    times.append(sum(c.forward for c in costs[start : start + size]))
                    start += size
                start = 0
                for size in backward:
                    times.append(sum(c.backward for c in costs[start : start + size]))
                    start += size
                count = len(forward) + len(backward) + 1
                best = min(best, (micro_batches * count + devices * (devices - 1)) * max(times))
    return best


def objective(stages, costs, devices, micro_batches):
    def time(stage):
        return sum(costs[i].backward if stage.backward else costs[i].forward for i in stage.layers)

    return (micro_batches * len(stages) + devices * (devices - 1)) * max(map(time, stages))


@pytest.mark.parametrize("seed", range(12))
def test_as_good_as_brute_force(seed):
    rng = random.Random(seed)
    layers, devices, micro_batches = rng.randint(1, 6), rng.randint(1, 8), rng.randint(1, 16)
    costs = [LayerCost(f := rng.randint(1, 9), 3 * f + rng.randint(0, 2)) for _ in range(layers)]
    stages = partition(costs, devices, micro_batches)
    assert stages is not None
    validate(Plan(stages, devices, micro_batches, micro_batches), layers)
    assert objective(stages, costs, devices, micro_batches) == pytest.approx(brute_force(costs, devices, micro_batches))


def test_forward_stages_hold_more_layers_than_backward_stages():
    stages = partition([LayerCost(1, 3)] * 12 + [LayerCost(0, 3)], devices=4, micro_batches=8)
    assert stages is not None
    forward = [stage for stage in stages if stage.kind == "F"]
    backward = [stage for stage in stages if stage.kind == "B"]
    assert max(len(s.layers) for s in forward) > max(len(s.layers) for s in backward)


def test_memory_limits_every_stage():
    def fits(stage: Stage) -> bool:
        return len(stage.layers) <= 2

    stages = partition([LayerCost(1, 3)] * 8 + [LayerCost(0, 9)], 1, 4, fits)
    assert stages is not None
    assert all(map(fits, stages))
    validate(Plan(stages, 1, 4, 4), 9)
    assert partition([LayerCost(1, 3)] * 8, 1, 4, lambda stage: stage.start > 2) is None
