"""The other schedules: their closed forms, their order, what they hold."""

import itertools
import random
from fractions import Fraction

import pytest

from rptrain.schedule.baselines import best, evenly, gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.partition import split
from rptrain.schedule.simulate import simulate

SIZES = [(devices, micro_batches) for devices in range(1, 7) for micro_batches in range(devices, 4 * devices + 1)]


def equal(stages):
    """As many layers, all alike: the head's backward is 3 without its forward."""
    return [LayerCost(1, 3)] * (stages - 1) + [LayerCost(1, 4)]


def bubble(program, work):
    return 1 - Fraction(work) / (program.devices * Fraction(simulate(program).makespan))


@pytest.mark.sample(16)
@pytest.mark.parametrize(("devices", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_one_stage_a_device(schedule, devices, micro_batches):
    program = schedule(equal(devices), devices, micro_batches)
    assert bubble(program, 4 * devices * micro_batches) == Fraction(devices - 1, micro_batches + devices - 1)


@pytest.mark.sample(24)
@pytest.mark.parametrize(("devices", "micro_batches"), SIZES)
@pytest.mark.parametrize("loops", [1, 2, 3])
@pytest.mark.parametrize("schedule", [interleaved_1f1b, looped_bfs])
def test_several_stages_a_device(schedule, loops, devices, micro_batches):
    """N (N - 1) / (S M + N (N - 1)), section 2.3."""
    if schedule is interleaved_1f1b:
        micro_batches -= micro_batches % devices
    stages, ramp = loops * devices, devices * (devices - 1)
    program = schedule(equal(stages), devices, micro_batches, loops)
    assert bubble(program, 4 * stages * micro_batches) == Fraction(ramp, stages * micro_batches + ramp)


def every_schedule(costs, devices, micro_batches, loops, **options):
    yield gpipe(costs, devices, micro_batches, **options)
    yield one_f_one_b(costs, devices, micro_batches, **options)
    yield interleaved_1f1b(costs, devices, micro_batches, loops, **options)
    yield looped_bfs(costs, devices, micro_batches, loops, **options)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(12))
def test_every_stage_runs_each_way_once_for_each_micro_batch_and_in_order(seed):
    rng = random.Random(seed)
    devices, loops = rng.randint(1, 4), rng.randint(1, 3)
    micro_batches, layers = devices * rng.randint(1, 3), devices * loops + rng.randint(0, 5)
    costs = [LayerCost(f := rng.randint(1, 9), 3 * f) for _ in range(layers)]
    for program in every_schedule(costs, devices, micro_batches, loops):
        timeline = simulate(program)
        spans = {
            (task.kind, task.micro_batch, layer): (start, end, task.device)
            for task, start, end in zip(program.tasks, timeline.starts, timeline.ends, strict=True)
            for layer in task.layers
        }
        assert len(spans) == sum(len(task.layers) for task in program.tasks) == 2 * layers * micro_batches
        for m in range(micro_batches):
            way = [spans["F", m, i] for i in range(layers)] + [spans["B", m, i] for i in reversed(range(layers))]
            for before, after in itertools.pairwise(way):
                assert after[:2] == before[:2] or after[0] >= before[1]
            assert all(spans["F", m, i][2] == spans["B", m, i][2] for i in range(layers))


@pytest.mark.sample(12)
@pytest.mark.parametrize(("devices", "micro_batches"), SIZES)
def test_inputs_that_wait_for_backward(devices, micro_batches):
    """1F1B holds those of at most N - s micro-batches on device s, with v stages of 2 (N - s - 1) + (v - 1) N + 1."""
    stages = equal(devices)
    with_turns = simulate(one_f_one_b(stages, devices, micro_batches, boundary=1))
    assert [with_turns.peak(s) for s in range(devices)] == [min(devices - s, micro_batches) for s in range(devices)]
    turns_and_loops = simulate(interleaved_1f1b(equal(2 * devices), devices, 4 * devices, 2, boundary=1))
    assert [turns_and_loops.peak(s) for s in range(devices)] == [
        min(2 * (devices - s - 1) + devices + 1, 8 * devices) for s in range(devices)
    ]
    at_once = simulate(gpipe(stages, devices, micro_batches, boundary=1))
    assert [at_once.peak(s) for s in range(devices)] == [micro_batches] * devices


def test_weights_gradients_and_what_backward_keeps_are_held():
    costs = [LayerCost(1, 3, params=100, grads=10, kept=1)] * 3 + [LayerCost(1, 4, params=1000, grads=20, kept=2)]
    timeline = simulate(looped_bfs(costs, 2, 2, 2))
    assert (timeline.peak(0), timeline.peak(1)) == (2 * (100 + 20) + 1, 100 + 20 + 1000 + 40 + 2)


def test_the_head_is_recomputed_where_asked():
    costs = [LayerCost(1, 3), LayerCost(5, 15)]
    for program, again in zip(
        every_schedule(costs, 2, 2, 1), every_schedule(costs, 2, 2, 1, recompute_head=True), strict=True
    ):
        assert (simulate(program).busy(1), simulate(again).busy(1)) == (2 * 15, 2 * 20)
        assert simulate(program).busy(0) == simulate(again).busy(0) == 2 * 4


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(20))
def test_even_cuts_have_the_least_sum_of_squares(seed):
    rng = random.Random(seed)
    times = [rng.randint(1, 9) for _ in range(rng.randint(1, 9))]
    parts = rng.randint(1, len(times))

    def squares(stops):
        return sum(sum(times[a:b]) ** 2 for a, b in itertools.pairwise((0, *stops)))

    every = [(*cuts, len(times)) for cuts in itertools.combinations(range(1, len(times)), parts - 1)]
    cuts = evenly(times, parts)
    assert len(cuts) == parts
    assert squares(cuts) == min(map(squares, every))


def test_the_cut_decides_the_stages():
    program = one_f_one_b([LayerCost(1, 3)] * 3, 2, 2, cut=lambda times, parts: (1, 3))
    assert {(task.device, task.layers) for task in program.tasks} == {(0, range(1)), (1, range(1, 3))}


def test_the_best_of_each_schedule():
    costs = [LayerCost(0.1, 0.3, 10, 10, 5)] * 8 + [LayerCost(0.07, 0.2, 10, 10, 5)]
    found = best(costs, 2, 6)
    assert {name: one.loops for name, one in found.items() if name in ("GPipe", "1F1B")} == {"GPipe": 1, "1F1B": 1}
    for name, schedule in (("Interleaved 1F1B", interleaved_1f1b), ("Looped BFS", looped_bfs)):
        times = {
            (loops, cut): simulate(schedule(costs, 2, 6, loops, cut=cut)).makespan
            for loops in (1, 2, 3, 4)
            for cut in (split, evenly)
        }
        assert found[name].seconds == pytest.approx(min(times.values()))
        fewest = min(loops for (loops, _), seconds in times.items() if seconds < min(times.values()) + 1e-6)
        assert found[name].loops == fewest
    cuts = {"split": split, "evenly": evenly}
    for name, schedule in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        timeline = simulate(schedule(costs, 2, 6, cut=cuts[found[name].cut]))
        assert found[name].seconds == timeline.makespan and found[name].peak == max(map(timeline.peak, range(2)))
    head = best(costs, 2, 6, recompute_head=True)
    assert all(head[name].seconds > one.seconds for name, one in found.items())


def test_schedules_that_are_not_possible_are_left_out():
    assert set(best(equal(8), 4, 6)) == {"GPipe", "1F1B", "Looped BFS"}, "6 is not a multiple of 4"
    assert {one.loops for one in best(equal(8), 1, 8).values()} == {1}
    assert best(equal(4), 5, 10) == {}
