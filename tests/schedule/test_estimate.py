"""The quick estimate of a step against the event simulation of the same plan."""

import random
from dataclasses import replace

import pytest

from rptrain.schedule import estimate as estimates
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import Links, dispatch
from rptrain.schedule.estimate import Setting, estimate
from rptrain.schedule.partition import partition
from rptrain.schedule.plan import Plan
from rptrain.schedule.simulate import simulate
from tests.cases import grid
from tests.schedule.plans import random_costs, random_stages


def simulated(costs, stages, setting):
    """Seconds a step in the long run: in sync of any after the first, in async of 2 N after the first 2 N."""
    plan = Plan(stages, setting.devices, setting.micro_batches, setting.round_size)
    span = 2 * setting.devices if setting.lag else 2
    program = dispatch(plan, costs, links=setting.links, lag=setting.lag, iterations=2 * span)
    timeline = simulate(program)
    return timeline.period(span - 1, 2 * span - 1)


def random_case(seed, lag, links=None, **costs):
    rng = random.Random(seed)
    layers, devices, rounds = rng.randint(1, 9), rng.randint(1, 5), rng.choice([1, 1, 2])
    size = rng.randint(devices, 2 * devices + 2)
    of_layers = random_costs(rng, layers, updates=rng.choice([(0,), (0, 0, 2), (1, 5)]), **costs)
    return of_layers, random_stages(rng, layers), Setting(devices, rounds * size, size, lag, links)


@pytest.mark.sample(16)
@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(100))
def test_without_links_it_is_the_simulation(seed, lag):
    costs, stages, setting = random_case(seed, lag)
    found = estimate(costs, stages, setting)
    period = simulated(costs, stages, setting)
    assert found.period == pytest.approx(period, rel=1e-9)
    work = setting.micro_batches * sum(
        sum(costs[i].backward if stage.backward else costs[i].forward for i in stage.layers) for stage in stages
    )
    assert found.bubble == pytest.approx(1 - work / (setting.devices * period), abs=1e-9)


@pytest.mark.sample(10)
@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(50))
def test_exchanges_between_processes_are_those_of_the_simulation(seed, lag):
    """Stages leave all their gradients at once, and a stage's are taken to be there after those before it."""
    costs, stages, setting = random_case(seed, lag)
    rng = random.Random(seed)
    costs = [
        replace(cost, add=rng.choice([0, 2]), reduce=rng.choice([0, 1, 9]), gather=rng.choice([0, 1, 9]))
        for cost in costs
    ]
    assert estimate(costs, stages, setting).period == pytest.approx(simulated(costs, stages, setting), rel=1e-9)


@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
def test_a_slow_network_is_the_limit(lag):
    """It carries one message after the other: sums first, and then updated weights."""
    costs, stages, setting = random_case(3, lag)
    costs = [replace(cost, reduce=1e4, gather=1e3) for cost in costs]
    assert estimate(costs, stages, setting).period == pytest.approx(1.1e4 * len(costs), rel=0.02)


@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
def test_the_time_is_that_of_the_long_run(lag):
    """Steps may end in pairs, and the first ones may take longer, also where the stages are all but equal."""
    uneven = [LayerCost(0.0065, 0.0195)] * 28 + [LayerCost(0.033, 0.099)]
    cases = [("FB0-0 | N=3 M=8 MR=8", [LayerCost(0, 5)])]
    cases += [("F0-14 F15-27 FB28-28 B23-27 B18-22 B13-17 B8-12 B3-7 B0-2 | N=4 M=16 MR=16", uneven)]
    for text, costs in cases:
        plan = Plan.parse(text)
        setting = Setting(plan.devices, plan.micro_batches, plan.round_size, lag)
        steps = 20 * plan.devices
        timeline = simulate(dispatch(plan, costs, lag=lag, iterations=steps))
        later = timeline.period(steps // 2 - 1, steps - 1)
        assert estimate(costs, plan.stages, setting).period == pytest.approx(later, rel=1e-3)


@pytest.mark.sample(10)
@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(60))
def test_links_never_make_a_step_shorter(seed, lag):
    rng = random.Random(seed)
    links = Links(up=rng.uniform(1, 20), down=rng.uniform(1, 20), boundary=rng.randint(0, 9), latency=rng.random())
    costs, stages, setting = random_case(seed, lag, links, params=20)
    without = Setting(setting.devices, setting.micro_batches, setting.round_size, lag)
    assert estimate(costs, stages, setting).period >= estimate(costs, stages, without).period * (1 - 1e-9)


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(60))
def test_over_links_it_is_not_above_the_simulation(seed):
    """But for 1 %, where steps differ. What it leaves out makes them longer; updates are the longest part of some."""
    rng = random.Random(seed)
    links = Links(up=rng.uniform(2, 20), down=rng.uniform(2, 20), boundary=rng.randint(0, 9), chunk=5, latency=0)
    costs, stages, setting = random_case(seed, seed % 2, links, params=20)
    costs = [replace(cost, update=cost.update * rng.choice([1, 10])) for cost in costs]
    assert estimate(costs, stages, setting).period <= simulated(costs, stages, setting) * 1.01


@pytest.mark.parametrize("up", [True, False], ids=["parameters", "gradients"])
def test_a_step_takes_about_as_long_as_its_bytes_where_they_are_many(up):
    """The first of a slot's eight micro-batches is taken to be there at once, so an eighth is not counted."""
    links = Links(up=1 if up else 1e9, down=1e9 if up else 1, boundary=1, latency=0)
    costs = [LayerCost(1, 3, params=5000, grads=5000)] * 4
    plan = Plan.parse("F0-0 F1-1 F2-2 FB3-3 B2-2 B1-1 B0-0 | N=3 M=8 MR=8")
    moved = 5000 * (7 if up else 4)  # through three links
    period = estimate(costs, plan.stages, Setting(3, 8, 8, 1, links)).period
    assert moved / 3 * 7 / 8 <= period <= 1.8 * moved / 3


GB = 1e9
# Blocks, their forward and the head's in seconds for 8,192 tokens on a card of 165 TFLOPS, parameters, hidden size.
MODELS = {
    "1.7b": (28, 0.0065, 0.033, 50e6, 311e6, 2048),
    "8b": (32, 0.031, 0.066, 218e6, 525e6, 4096),
    "experts": (24, 0.02, 0.08, 800e6, 579e6, 2880),
}


@pytest.mark.parametrize("rounds", [1, grid(2)])
@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("model", ["1.7b", grid("8b"), "experts"])
def test_with_links_it_is_near_the_simulation(model, devices, lag, rounds):
    """At most 2 % below, as what a link does between two slots is not counted, and 0.1 % above."""
    blocks, forward, head, block_size, head_size, hidden = MODELS[model]

    def cost(seconds, parameters):
        nbytes = round(2 * parameters)
        grads, update = nbytes if rounds == 1 else 2 * nbytes, parameters * 28 / (100 * GB)
        return LayerCost(seconds, 3 * seconds, nbytes, grads, update=update, sums=2 * nbytes)

    costs = [cost(forward, block_size)] * blocks + [cost(head, head_size)]
    links = Links(up=20 * GB, down=20 * GB, boundary=8192 * hidden * 2)
    stages = partition(costs, devices, 16)
    assert stages is not None
    setting = Setting(devices, 16, 16 // rounds, lag, links)
    assert 0.98 <= estimate(costs, stages, setting).period / simulated(costs, stages, setting) <= 1.001


@pytest.mark.sample(8)
@pytest.mark.skipif(estimates._library() is None, reason="installed without a compiler")
@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(20))
def test_native_code_has_the_bits_of_python(seed, lag, monkeypatch):
    rng = random.Random(seed)
    links = rng.choice([None, Links(3.3, 1.7, 2, latency=0.3)])
    costs, stages, setting = random_case(seed, lag, links)
    costs = [
        replace(
            cost,
            forward=cost.forward * 1.1,
            grads=rng.randint(0, 40),
            sums=rng.randint(0, 40),
            reduce=rng.choice([0.0, 0.7]),
        )
        for cost in costs
    ]
    setting = replace(setting, groups=rng.choice([1, 2]))
    found = estimate(costs, stages, setting)
    monkeypatch.setattr(estimates, "_library", lambda: None)
    assert found == estimate(costs, stages, setting)


@pytest.mark.skipif(estimates._library() is None, reason="installed without a compiler")
@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
def test_native_code_waits_for_slow_downloads_as_python_does(lag, monkeypatch):
    """Gradients leave long after their stage's end, with the fewest micro-batches and no sums over processes."""
    cases = []
    for seed in range(40):
        rng = random.Random(seed)
        links = Links(up=50.0, down=rng.uniform(0.5, 4), boundary=0, latency=0.0)
        costs, stages, setting = random_case(seed, lag, links)
        costs = [replace(cost, forward=cost.forward * 1.1, grads=rng.choice([0, 5, 90])) for cost in costs]
        size = rng.choice([1, setting.devices])
        cases.append((costs, stages, replace(setting, round_size=size, micro_batches=3 * size, groups=seed % 2 + 1)))
    found = [estimate(*case) for case in cases]
    monkeypatch.setattr(estimates, "_library", lambda: None)
    assert found == [estimate(*case) for case in cases]
