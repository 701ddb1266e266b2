"""The searched partition against the paper's and against every other."""

import random
from dataclasses import replace
from functools import cache

import pytest

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import Links
from rptrain.schedule.estimate import Setting, estimate
from rptrain.schedule.partition import partition
from rptrain.schedule.plan import Plan, Stage
from rptrain.schedule.search import search
from rptrain.schedule.validate import validate
from tests.schedule.plans import every_stages, random_costs

CASES = 300
MISSES = 6  # of CASES: the search is not exhaustive; of 6,000 cases it missed the best in 31
MISSED_BY = 1.12  # how much longer a missed best makes a step: at most 11 % in those


def random_case(seed, layers):
    rng = random.Random(seed)
    devices, rounds = rng.randint(1, 4), rng.choice([1, 2])
    size = rng.randint(devices, 2 * devices + 2)
    costs = random_costs(rng, layers, updates=rng.choice([(0,), (0, 2)]), params=20)
    links = Links(rng.uniform(1, 20), rng.uniform(1, 20), rng.randint(0, 9), latency=rng.random())
    setting = Setting(devices, rounds * size, size, rng.randint(0, 1), links if seed % 2 else None)
    most = rng.choice([layers, 1, 2, 3])  # layers that a backward stage has memory for
    return costs, setting, lambda stages: all(len(stage.layers) <= most for stage in stages if stage.backward)


def test_few_layers_are_cut_in_the_best_way_but_for_a_few_cases():
    missed = []
    for seed in range(CASES):
        layers = 1 + seed % 6
        costs, setting, fits = random_case(seed, layers)
        found = search(costs, setting, fits)
        assert found is not None
        validate(Plan(found.stages, setting.devices, setting.micro_batches, setting.round_size), layers)
        assert fits(found.stages)
        assert found.estimate == estimate(costs, found.stages, setting)
        best = min(estimate(costs, stages, setting).period for stages in every_stages(layers) if fits(stages))
        if found.estimate.period > best * (1 + 1e-5):
            missed.append(found.estimate.period / best)
    assert len(missed) <= MISSES
    assert all(by <= MISSED_BY for by in missed)


def test_a_short_search_finds_stages_that_its_start_rules_out():
    """Starts of one layer at the ends leave out the only stages that fit: one for each layer."""
    costs = random_costs(random.Random(0), 6, updates=(0,), params=20)
    near = Plan.parse("F0-0 F1-2 F3-4 FB5-5 B3-4 B1-2 B0-0 | N=2 M=4 MR=4").stages
    found = search(costs, Setting(2, 4, 4, 0, None), lambda stages: len(stages) == 11, near=near)
    assert found is not None and len(found.stages) == 11


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(8))
def test_a_short_search_starts_from_the_stages_of_other_costs(seed, monkeypatch):
    """It is never slower than those stages or the candidates, and a longer one is never slower."""
    rng = random.Random(seed)
    costs, setting, fits = random_case(seed, rng.randint(8, 16))
    whole = search(costs, setting, fits)
    other = search([replace(cost, forward=cost.forward / 2) for cost in costs], setting, fits)
    assert whole is not None and other is not None
    monkeypatch.setattr("rptrain.schedule.search.FEW", 0)
    least = search(costs, setting, fits, near=other.stages)
    assert least is not None
    assert least.estimate.period <= estimate(costs, other.stages, setting).period * (1 + 2e-6)
    monkeypatch.setattr("rptrain.schedule.search.FEW", 30)
    short = search(costs, setting, fits, near=other.stages)
    assert short is not None and short.estimate.period <= least.estimate.period * (1 + 2e-6)
    again = search(costs, setting, fits, near=whole.stages)
    assert again is not None and again.estimate.period <= whole.estimate.period * (1 + 2e-6)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", [*range(20), 171, 212])  # in the last two it is the best start
def test_never_slower_than_the_papers_partition(seed):
    rng = random.Random(seed)
    costs, setting, _ = random_case(seed, rng.randint(7, 30))
    papers = partition(costs, setting.devices, setting.micro_batches)
    found = search(costs, setting)
    assert papers is not None and found is not None
    assert found.estimate.period <= estimate(costs, papers, setting).period * (1 + 2e-6)


@pytest.mark.parametrize(("lag", "at_most"), [(0, 0.95), (1, 0.995)], ids=["sync", "async"])
def test_a_uniform_model_gets_a_better_plan_than_the_papers(lag, at_most):
    costs = [LayerCost(1.0, 3.0)] * 28 + [LayerCost(5.1, 15.3)]
    setting = Setting(8, 16, 16, lag)
    papers, found = partition(costs, 8, 16), search(costs, setting)
    assert papers is not None and found is not None
    assert found.estimate.period < at_most * estimate(costs, papers, setting).period


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(10))
def test_limits_hold_for_the_whole_partition(seed):
    """Memory is that of all stages together: the largest of each kind must fit beside each other."""
    costs, setting, _ = random_case(seed, 20)

    def size(stages):
        longest = [max((len(s.layers) for s in stages if s.backward == back), default=0) for back in (False, True)]
        return longest[0] + 2 * longest[1]

    for limit in (3, 7, 12):
        found = search(costs, setting, lambda stages, limit=limit: size(stages) <= limit)
        assert found is not None
        assert size(found.stages) <= limit


@pytest.mark.parametrize("layers", [1, 2, 5, 30])
def test_single_layers_are_the_last_resort_and_none_is_said_where_they_do_not_fit(layers):
    costs, setting, _ = random_case(layers, layers)

    def single(stages):
        return all(len(stage.layers) == 1 for stage in stages)

    found = search(costs, setting, single)
    assert found is not None and single(found.stages)
    head = Stage("FB", layers - 1, layers)
    assert found.stages.count(head) == 1 and len(found.stages) == 2 * layers - 1
    assert search(costs, setting, lambda stages: False) is None


def test_equal_input_gives_equal_output():
    costs, setting, fits = random_case(3, 24)
    assert search(costs, setting, fits) == search(list(costs), setting, cache(fits))
