"""RoundPipe plans as programs: closed forms, and every constraint checked again from the times of the tasks."""

import random
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

import pytest

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import Links, dispatch
from rptrain.schedule.lower import RING
from rptrain.schedule.plan import Plan
from rptrain.schedule.simulate import COMPUTATION, HOST, simulate
from rptrain.schedule.validate import validate
from tests.schedule.plans import equal_stages, random_costs, random_stages

EQUAL = [(forward, ratio) for forward in range(4) for ratio in (1, 2, 3)]  # 1 to 13 stages


class Times:
    """Start and end of the tasks of a timeline, found by what they are."""

    def __init__(self, plan, timeline):
        self.plan = plan
        self.lanes = defaultdict(list)  # (lane, device): (start, end, task) in order of time
        self.compute, self.inputs, self.outputs, self.updates, self.sums = {}, {}, {}, {}, {}
        self.params, self.grads = defaultdict(list), defaultdict(list)
        for task, start, end in zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True):
            span = start, end
            self.lanes[task.lane, task.device].append((start, end, task))
            owner = task.iteration, task.round, task.device
            if task.kind == "update":
                self.updates[task.iteration, task.layers[0]] = span
            elif task.kind == "params":
                self.params[(*owner, task.layers[0])].append(span)
            elif task.kind == "sums":
                self.sums[task.iteration, task.round, task.layers[0]] = span
            elif task.kind == "grads":
                self.grads[task.iteration, task.round, task.layers[0]].append(span)
            else:
                kinds = {"x": self.inputs, "y": self.outputs}
                # Transfers do not say which way their stage goes; the copies of a device are in order of its slots.
                kinds.get(task.kind, self.compute).setdefault((task.iteration, task.device), []).append(span)
        for lane in self.lanes.values():
            lane.sort(key=lambda run: run[:2])

    def slots(self, iterations):
        """(iteration, slot, spans of its micro-batches in compute, inputs and outputs) in dispatch order."""
        for iteration in range(iterations):
            taken = defaultdict(int)
            for slot in self.plan.slots(iteration):
                key, first = (iteration, slot.device), taken[slot.device]
                last = taken[slot.device] = first + len(slot.micro_batches)
                lists = (self.compute, self.inputs, self.outputs)
                yield iteration, slot, *(spans.get(key, [])[first:last] for spans in lists)


REPLICATED = 40  # random cases from this seed on have replicas
SEEDS = pytest.mark.parametrize("seed", range(REPLICATED + 16))
pytestmark = pytest.mark.sample(12)


def random_case(seed, **costs):
    rng = random.Random(seed)
    layers, devices, rounds, replicas = rng.randint(1, 8), rng.randint(1, 4), rng.choice([1, 1, 2]), 1
    size = rng.randint(devices, 2 * devices + 2)
    if seed >= REPLICATED:
        replicas = rng.randint(2, 5)
        devices = rng.choice([n for n in range(1, 9) if n < replicas or n % replicas == 0])
    plan = Plan(random_stages(rng, layers), devices, replicas * rounds * size, size, replicas)
    validate(plan, layers)
    return plan, random_costs(rng, layers, updates=(0, 1, 3), **costs), rng.randint(0, 1)


LINKS = Links(up=2, down=1, boundary=2, chunk=5, latency=0.5)


def run(seed, links, iterations=4):
    plan, costs, lag = random_case(seed, params=17)
    timeline = simulate(dispatch(plan, costs, links=links, lag=lag, iterations=iterations))
    return plan, lag, timeline, Times(plan, timeline)


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize(("forward", "ratio"), EQUAL)
def test_equal_stages_idle_as_long_as_the_paper_says(devices, forward, ratio):
    """N (N - 1) / (M S + N (N - 1)), section 3.3, where each device gets as many stages.

    With fewer stages than devices, devices that a round leaves out begin the next one at once: less.
    """
    stages, costs = equal_stages(forward, ratio)
    checked = 0
    for size in (devices, devices + 1, 2 * devices + 3):
        for rounds in range(1, devices + 1):
            if len(stages) * rounds % devices == 0:
                micro_batches, ramp = size * rounds, devices * (devices - 1)
                timeline = simulate(dispatch(Plan(stages, devices, micro_batches, size), costs))
                bubble = 1 - Fraction(micro_batches * len(stages) * ratio) / (devices * Fraction(timeline.makespan))
                formula = Fraction(ramp, micro_batches * len(stages) + ramp)
                assert bubble == formula if len(stages) >= devices else bubble <= formula
                assert timeline.bubble() == pytest.approx(float(bubble), abs=1e-12)
                checked += 1
    assert checked


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize(("forward", "ratio"), EQUAL)
def test_equal_stages_never_idle_in_async(devices, forward, ratio):
    """In the long run, where there are enough of them: a step starts after the end of the last but one."""
    stages, costs = equal_stages(forward, ratio)
    for size, rounds in ((devices, 1), (devices + 3, 1), (devices, 2)):
        plan = Plan(stages, devices, size * rounds, size)
        timeline = simulate(dispatch(plan, costs, lag=1, iterations=devices + 2))
        took = timeline.end_of(devices + 1) - timeline.end_of(1)  # N steps: each device had every stage
        work = plan.micro_batches * len(stages) * ratio
        assert took == work if len(stages) * rounds >= devices - 1 else took >= work


def test_at_most_two_steps_are_under_way_in_async():
    timeline = simulate(dispatch(Plan.parse("FB0-0 | N=4 M=4 MR=4"), [LayerCost(0, 5)], lag=1, iterations=9))
    assert timeline.steady_bubble(4, 8) == 0.5


@pytest.mark.parametrize("links", [None, LINKS], ids=["compute", "links"])
@SEEDS
def test_every_micro_batch_and_every_device_keeps_its_order(seed, links):
    plan, _, timeline, times = run(seed, links)
    arrived, free = {}, defaultdict(float)
    used = defaultdict(list)  # spans of computation and output of each device's micro-batches
    for _, slot, computed, inputs, outputs in times.slots(4):
        assert len(computed) == plan.round_size
        for i, (m, (start, end)) in enumerate(zip(slot.micro_batches, computed, strict=True)):
            assert start >= free[slot.device]
            free[slot.device] = end
            ready = arrived.get(m, 0.0) if slot.stage_index else 0.0
            if links is not None:
                assert inputs[i][0] >= ready
                assert outputs[i][0] >= end
                ready = inputs[i][1]
                ring = used[slot.device]
                if len(ring) >= RING:  # places for inputs and outputs are used in turn
                    assert inputs[i][0] >= ring[-RING][0][1]
                    assert start >= ring[-RING][1][1]
                ring.append((computed[i], outputs[i]))
            assert start >= ready
            arrived[m] = end if links is None else outputs[i][1]
    computed = [task for task in timeline.program.tasks if task.kind in COMPUTATION]
    assert len(computed) == 4 * len(plan.stages) * plan.micro_batches


@pytest.mark.parametrize("links", [None, LINKS], ids=["compute", "links"])
@SEEDS
def test_a_lane_does_one_thing_at_a_time(seed, links):
    times = run(seed, links)[3]
    for done in times.lanes.values():
        assert all(before[1] <= after[0] for before, after in pairwise(done))


@pytest.mark.parametrize("links", [None, LINKS], ids=["compute", "links"])
@SEEDS
def test_weights_are_read_after_the_update_they_come_from(seed, links):
    """Sync reads what the step before made, async what the one before that did."""
    _, lag, _, times = run(seed, links)
    for iteration, slot, computed, _, _ in times.slots(4):
        for layer in slot.stage.layers:
            made = times.updates.get((iteration - 1 - lag, layer), (0.0, 0.0))[1]
            reads = times.params[iteration, slot.round, slot.device, layer] if links else computed
            assert all(start >= made for start, _ in reads)
    ends = [max(computed[-1][1] for i, _, computed, _, _ in times.slots(4) if i == n) for n in range(4)]
    downloads = defaultdict(float)
    for (iteration, _, _), spans in times.grads.items():
        downloads[iteration] = max(downloads[iteration], *(end for _, end in spans))
    for (iteration, _), (start, _) in times.updates.items():
        assert start >= max(ends[iteration], downloads[iteration])
    for (iteration, _, layer), spans in times.grads.items():  # the host's last gradients were read
        assert min(start for start, _ in spans) >= times.updates.get((iteration - 1, layer), (0.0, 0.0))[1]


def test_async_does_not_wait_for_the_step_before():
    plan, costs = Plan.parse("F0-1 FB2-2 B0-1 | N=2 M=2 MR=2"), [LayerCost(1, 3, update=10)] * 3
    first_of_second = {}
    for lag in (0, 1):
        times = Times(plan, simulate(dispatch(plan, costs, lag=lag, iterations=2)))
        computed = next(computed for i, _, computed, _, _ in times.slots(2) if i == 1)
        first_of_second[lag] = computed[0][0], times.updates[0, 1][1]
    assert first_of_second[0][0] == first_of_second[0][1]  # the update of the last layer of the first stage
    assert first_of_second[1][0] < first_of_second[1][1]


@SEEDS
def test_activations_go_before_parameters(seed):
    """No parameters set out while an input was there to be copied and had a place to go to."""
    _, lag, _, times = run(seed, LINKS)
    sent, used = {}, defaultdict(list)
    for iteration, slot, computed, inputs, outputs in times.slots(4):
        for i, m in enumerate(slot.micro_batches):
            ready = sent[m] if slot.stage_index else times.updates.get((iteration - 1 - lag, 0), (0.0, 0.0))[1]
            ring = used[slot.device]
            ready = max(ready, ring[-RING] if len(ring) >= RING else 0.0)
            ring.append(computed[i][1])
            sent[m] = outputs[i][1]
            for start, _, task in times.lanes["up", slot.device]:
                assert not (task.kind == "params" and ready <= start < inputs[i][0])


@SEEDS
def test_a_device_holds_parameters_and_gradients_of_two_stages(seed):
    plan, costs, lag = random_case(seed, params=17)
    times = Times(plan, simulate(dispatch(plan, costs, links=LINKS, lag=lag, iterations=4)))
    params, grads = defaultdict(list), defaultdict(list)
    for iteration, slot, computed, _, _ in times.slots(4):
        uploads = []
        for layer in slot.stage.layers:
            of_layer, count = times.params[iteration, slot.round, slot.device, layer], -(-costs[layer].params // 5)
            uploads += of_layer[:count] if slot.stage.kind == "F" else of_layer[-count:]
        assert max(end for _, end in uploads) <= computed[0][0]  # all there when the stage starts
        params[slot.device].append((min(start for start, _ in uploads), computed[-1][1]))
        if slot.stage.backward:
            down = [span for layer in slot.stage.layers for span in times.grads[iteration, slot.round, layer]]
            assert min(start for start, _ in down) >= computed[-1][1]
            grads[slot.device].append((computed[0][0], max(end for _, end in down)))
    for held in (*params.values(), *grads.values()):
        assert all(later[0] >= earlier[1] for earlier, later in zip(held, held[2:], strict=False))


def test_a_stage_starts_with_all_its_parameters_and_they_come_during_the_one_before():
    plan, costs = Plan.parse("FB0-1 | N=1 M=2 MR=2"), [LayerCost(0, 50, params=20, grads=4)] * 2
    links = Links(up=1, down=1, boundary=1, chunk=10, latency=0)
    times = Times(plan, simulate(dispatch(plan, costs, links=links, lag=1, iterations=2)))
    (_, _, first, _, _), (_, _, second, _, _) = times.slots(2)
    pieces = [times.params[i, 0, 0, layer] for i in range(2) for layer in range(2)]
    assert first[0][0] == 2 + 4 * 10  # two inputs, then four pieces
    assert [len(p) for p in pieces] == [2] * 4
    assert second[0][0] == first[-1][1]  # nothing was waited for
    assert max(end for layer in (2, 3) for _, end in pieces[layer]) < second[0][0]


def test_peak_bytes_by_hand():
    """
    Link up: inputs 0 to 3 and 3 to 6, parameters 6 to 16. Compute: 16 to 36 and 36 to 56. Link down: outputs 36 to
    39 and 56 to 59, gradients 59 to 69. Most is held from 36 to 39: parameters, sums in float32, an input,
    both outputs, and what is kept.
    """
    plan, costs = Plan.parse("FB0-0 | N=1 M=2 MR=2"), [LayerCost(0, 20, params=10, grads=10, kept=100, sums=20)]
    links = Links(up=1, down=1, boundary=3, chunk=100, latency=0)
    timeline = simulate(dispatch(plan, costs, links=links))
    spans = {
        (task.kind, task.micro_batch): (start, end)
        for task, start, end in zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True)
    }
    assert spans["x", 1] == (3, 6) and spans["params", 0] == (6, 16) and spans["FB", 1] == (36, 56)
    assert spans["y", 0] == (36, 39) and spans["y", 1] == (56, 59) and spans["grads", 0] == (59, 69)
    assert timeline.peak(0) == 10 + 20 + 3 + 2 * 3 + 100


def test_what_is_dequantized_is_held_while_its_stage_is_computed():
    """Behind the parameters' arrival; what is only computed, without transfers, holds it as long."""
    plan, links = Plan.parse("F0-0 FB1-1 B0-0 | N=1 M=2 MR=2"), Links(up=1, down=1, boundary=3, latency=0)
    costs = [LayerCost(5, 20, params=4, kept=0, prepared=16), LayerCost(0, 20, params=2)]
    program = dispatch(plan, costs, links=links)
    held = [hold for hold in program.holds if hold.nbytes == 16]
    kinds = [tuple(program.tasks[task].kind for task in (hold.first, hold.last)) for hold in held]
    assert kinds == [("F", "F"), ("B", "B")]
    assert [program.tasks[hold.last].micro_batch - program.tasks[hold.first].micro_batch for hold in held] == [1, 1]


def test_host_holds_each_boundary_from_its_first_use_to_its_last():
    plan, costs = Plan.parse("F0-0 FB1-1 B0-0 | N=2 M=2 MR=2"), [LayerCost(1, 3)] * 2
    links = Links(up=1e9, down=1e9, boundary=8, latency=0)
    assert simulate(dispatch(plan, costs, links=links)).peak(HOST) == 2 * 2 * 8  # boundaries 0 and 1, twice


def test_costs_without_bytes_are_as_quick_over_links_that_are_quick():
    plan, costs = Plan.parse("F0-0 FB1-1 B0-0 | N=2 M=2 MR=2"), [LayerCost(1, 3, update=2)] * 2
    links = Links(up=1e18, down=1e18, boundary=1, latency=0)
    quick = simulate(dispatch(plan, costs, links=links, iterations=3)).makespan
    assert quick == pytest.approx(simulate(dispatch(plan, costs, iterations=3)).makespan)


@pytest.mark.parametrize("links", [None, LINKS], ids=["compute", "links"])
@pytest.mark.parametrize("seed", range(12))
def test_groups_of_devices_take_as_long_as_one_of_them_alone(seed, links):
    """They compute at the same time, share only the optimizer, and each device holds what it would hold alone."""
    alone, costs, lag = random_case(seed, params=17)
    replicas = 2 + seed % 3
    numbers = [replicas * number for number in (alone.devices, alone.micro_batches)]
    plan = Plan(alone.stages, *numbers, alone.round_size, replicas)
    validate(plan, len(costs))
    whole, one = (simulate(dispatch(each, costs, links=links, lag=lag, iterations=4)) for each in (plan, alone))
    assert [whole.end_of(i) for i in range(4)] == [one.end_of(i) for i in range(4)]
    for device in range(plan.devices):
        assert whole.busy(device) == one.busy(device % alone.devices)
        assert whole.peak(device) == one.peak(device % alone.devices)
    assert whole.peak(HOST) == replicas * one.peak(HOST)
    sums, alone_sums = (sum(task.kind == "sums" for task in each.program.tasks) for each in (whole, one))
    assert sums == replicas * alone_sums


@pytest.mark.parametrize("seed", range(12))
def test_fewer_devices_than_groups_compute_rounds_in_turn(seed):
    """As long as one device alone with its rounds, where each device has as many."""
    alone, costs, lag = random_case(seed)
    devices, factor = 1 + seed % 3, 2 + seed % 2
    size, micro_batches = alone.round_size, devices * factor * alone.micro_batches
    plan = Plan(alone.stages, devices, micro_batches, size, devices * factor)
    validate(plan, len(costs))
    single = Plan(alone.stages, 1, factor * alone.micro_batches, size)
    whole, one = (simulate(dispatch(each, costs, lag=lag, iterations=4)) for each in (plan, single))
    assert [whole.end_of(i) for i in range(4)] == [one.end_of(i) for i in range(4)]
    assert {whole.busy(device) for device in range(devices)} == {one.busy(0)}


def test_sums_come_back_only_in_later_rounds_of_their_group():
    """One device and two groups of one round, then of two: each group has gradient accumulators of its own."""
    costs = [LayerCost(0, 20, params=10, grads=20, sums=20)]
    links = Links(up=1, down=1, boundary=1, chunk=100, latency=0)
    for micro_batches, rounds in ((2, []), (4, [2, 3])):
        program = dispatch(Plan.parse(f"FB0-0 | N=1 M={micro_batches} MR=1 R=2"), costs, links=links)
        tasks = {(task.kind, task.round): index for index, task in enumerate(program.tasks)}
        sums = [task for task in program.tasks if task.kind == "sums"]
        assert [task.round for task in sums] == rounds
        for task in sums:
            of_grads = {program.tasks[index].round for index in task.after if program.tasks[index].kind == "grads"}
            assert tasks["grads", task.round - 2] in task.after
            assert of_grads <= {task.round - 2, task.round - 1}  # those before free the place of the accumulators
        assert simulate(program).end_of(0) > 0
