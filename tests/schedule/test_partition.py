"""The paper's partition against the best of all, within memory."""

import random
from functools import partial

import pytest

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.partition import Packer, partition
from rptrain.schedule.plan import Plan, Stage
from rptrain.schedule.validate import validate
from tests.schedule.plans import every_stages


def fewest(length, allowed):
    """The least number of groups of consecutive positions that are `allowed`, of the first so many."""
    counts = [0]
    for stop in range(1, length + 1):
        counts.append(1 + min((counts[start] for start in range(stop) if allowed(start, stop)), default=float("inf")))
    return counts[length]


def optimum(costs, devices, micro_batches, fits):
    """The least (M S + N (N - 1)) t_max over every partition whose stages fit: for each t_max the fewest stages."""
    layers = len(costs)
    stages = {
        kind: [Stage(kind, start, stop) for stop in range(1, layers + 1) for start in range(stop)]
        for kind in ("F", "FB", "B")
    }
    times = {
        stage: sum(costs[i].backward if stage.backward else costs[i].forward for i in stage.layers)
        for of_kind in stages.values()
        for stage in of_kind
        if fits(stage)
    }
    best = float("inf")
    for limit in set(times.values()):
        for body in range(layers):
            if times.get(Stage("FB", body, layers), float("inf")) > limit:
                continue

            def allowed(kind, start, stop, limit=limit):
                return times.get(Stage(kind, start, stop), float("inf")) <= limit

            count = 1 + sum(fewest(body, partial(allowed, kind)) for kind in ("F", "B"))
            best = min(best, (micro_batches * count + devices * (devices - 1)) * limit)
    return best


def objective(stages, costs, devices, micro_batches):
    def time(stage):
        return sum(costs[i].backward if stage.backward else costs[i].forward for i in stage.layers)

    return (micro_batches * len(stages) + devices * (devices - 1)) * max(map(time, stages))


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(60))
def test_the_best_of_all_that_fit(seed):
    rng = random.Random(seed)
    layers, devices, micro_batches = rng.randint(1, 10), rng.randint(1, 8), rng.randint(1, 16)
    costs = [LayerCost(f := rng.randint(1, 9), 3 * f + rng.randint(0, 2)) for _ in range(layers)]
    sizes = [rng.randint(1, 9) for _ in costs]
    forward, fused, backward = (rng.choice([max(sizes), 15, 25, 99]) for _ in range(3))
    limits = {"F": forward, "FB": min(fused, backward), "B": backward}  # what is part of a fused stage fits as well

    def fits(stage: Stage) -> bool:
        return sum(sizes[i] for i in stage.layers) <= limits[stage.kind]

    stages = partition(costs, devices, micro_batches, fits)
    assert stages is not None
    assert all(map(fits, stages))
    validate(Plan(stages, devices, micro_batches, micro_batches), layers)
    assert objective(stages, costs, devices, micro_batches) == optimum(costs, devices, micro_batches, fits)


def test_the_optimum_that_is_compared_with_is_the_best_of_every_partition():
    costs = [LayerCost(f, 3 * f + 1) for f in (2, 7, 1, 8)] + [LayerCost(3, 11)]
    every = [objective(stages, costs, 3, 4) for stages in every_stages(5)]
    assert optimum(costs, 3, 4, lambda stage: True) == min(every)


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


def test_the_work_of_a_search_grows_with_the_layers_and_not_faster(monkeypatch):
    counted = []

    def count(packer, limit, original=Packer.count):
        counted.append(limit)
        return original(packer, limit)

    monkeypatch.setattr(Packer, "count", count)
    found = []
    for layers in (50, 200):
        costs = [LayerCost(1 + i % 3 * 0.1, 3 + i % 3 * 0.2) for i in range(layers)] + [LayerCost(0, 2)]
        counted.clear()
        assert partition(costs, 2, 4)
        found.append(len(counted))
    assert found[1] <= 4 * found[0] < 1000
