"""The schedules that RoundPipe is compared with, as programs: GPipe, 1F1B, interleaved 1F1B, looped BFS.

Each binds a stage's weights to a device (paper section 2.3): of S = v N stages of consecutive layers, stage s lies on
device s mod N. Layers are recomputed in backward; the head is not, which favours these schedules. Transfers take no
time.
"""

from collections.abc import Callable, Sequence
from itertools import chain

from rptrain.plan.costs import LayerCost
from rptrain.plan.partition import split
from rptrain.plan.simulate import Hold, Program, Task

Op = tuple[str, int, int]  # kind F or B, stage, micro-batch


def gpipe(costs: Sequence[LayerCost], devices: int, micro_batches: int, boundary: int = 0) -> Program:
    """One stage a device, all forward, then all backward (Huang et al., 2019)."""
    return looped_bfs(costs, devices, micro_batches, 1, boundary)


def one_f_one_b(costs: Sequence[LayerCost], devices: int, micro_batches: int, boundary: int = 0) -> Program:
    """One stage a device; after the warm-up, forward and backward in turn (Harlap et al., 2018)."""

    def order(device: int) -> list[Op]:
        forward = [("F", device, m) for m in range(micro_batches)]
        backward = [("B", device, m) for m in range(micro_batches)]
        return _in_turn(forward, backward, devices - device - 1)

    return _bound(costs, devices, micro_batches, 1, order, boundary)


def interleaved_1f1b(
    costs: Sequence[LayerCost], devices: int, micro_batches: int, loops: int, boundary: int = 0
) -> Program:
    """`loops` stages a device, forward and backward in turn (Narayanan et al., 2021); M is a multiple of N."""

    def order(device: int) -> list[Op]:
        forward: list[Op] = []
        backward: list[Op] = []
        for first in range(0, micro_batches, devices):
            group = range(first, first + devices)
            for loop in range(loops):
                forward += [("F", loop * devices + device, m) for m in group]
                backward += [("B", (loops - 1 - loop) * devices + device, m) for m in group]
        return _in_turn(forward, backward, 2 * (devices - device - 1) + (loops - 1) * devices)

    return _bound(costs, devices, micro_batches, loops, order, boundary)


def looped_bfs(costs: Sequence[LayerCost], devices: int, micro_batches: int, loops: int, boundary: int = 0) -> Program:
    """`loops` stages a device, each with all micro-batches before the next (Lamy-Poirier, 2023)."""

    def order(device: int) -> list[Op]:
        stages = range(device, loops * devices, devices)
        forward = [("F", stage, m) for stage in stages for m in range(micro_batches)]
        return forward + [("B", stage, m) for stage in reversed(stages) for m in range(micro_batches)]

    return _bound(costs, devices, micro_batches, loops, order, boundary)


def _in_turn(forward: list[Op], backward: list[Op], warmup: int) -> list[Op]:
    warmup = min(warmup, len(forward))
    steady = zip(forward[warmup:], backward, strict=False)
    return [*forward[:warmup], *chain.from_iterable(steady), *backward[len(forward) - warmup :]]


def _bound(
    costs: Sequence[LayerCost],
    devices: int,
    micro_batches: int,
    loops: int,
    order: Callable[[int], list[Op]],
    boundary: int,
) -> Program:
    """Each device does its operations in order. A stage's input is kept from its forward to its backward."""
    *blocks, head = costs
    backward_times = [*(cost.backward for cost in blocks), head.backward - head.forward]
    stops = split([c.forward + b for c, b in zip(costs, backward_times, strict=True)], loops * devices)
    stages = [range(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]
    orders = [order(device) for device in range(devices)]
    position = {op: i for i, op in enumerate(chain.from_iterable(orders))}
    tasks: list[Task] = []
    holds: list[Hold] = []
    for device, ops in enumerate(orders):
        first, last = position[ops[0]], position[ops[-1]]
        for i, (kind, stage, m) in enumerate(ops):
            layers = stages[stage]
            times = [costs[layer].forward if kind == "F" else backward_times[layer] for layer in layers]
            after = [position[ops[i - 1]]] if i else []
            here = position[kind, stage, m]
            if kind == "F":
                if stage:
                    after.append(position["F", stage - 1, m])
                holds.append(Hold(device, boundary, here, position["B", stage, m]))
            else:
                last_stage = stage == len(stages) - 1
                after.append(position["F", stage, m] if last_stage else position["B", stage + 1, m])
                holds.append(Hold(device, sum(costs[layer].kept for layer in layers), here, here))
            tasks.append(Task("compute", device, sum(times), tuple(after), kind, layers, micro_batch=m))
        own = [costs[layer] for stage in range(device, len(stages), devices) for layer in stages[stage]]
        holds.append(Hold(device, sum(cost.params + 2 * cost.grads for cost in own), first, last))
    return Program(devices, tuple(tasks), tuple(holds))
