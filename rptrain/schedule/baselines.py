"""Other pipeline schedules as programs, for comparison: GPipe, 1F1B, interleaved 1F1B and looped BFS.

Each binds a stage's weights to a device (paper section 2.3): of S = v N stages of consecutive layers, stage s lies on
device s mod N. Layers are recomputed in backward. The head is not recomputed unless `recompute_head`,
because its backward follows its forward at once; this favors these schedules. The paper assumes that it is ("full
activation recomputation", section 5.1). Transfers take no time. `cut` chooses where stages end: `split` or `evenly`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, product
from math import inf

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.partition import split
from rptrain.schedule.simulate import Hold, Program, Task, simulate

Op = tuple[str, int, int]  # kind F or B, stage, micro-batch
Cut = Callable[[Sequence[float], int], tuple[int, ...]]  # times of layers, stages to stops


def evenly(times: Sequence[float], parts: int) -> tuple[int, ...]:
    """The ends of `parts` groups of consecutive layers with the least sum of squared times.

    Among equal choices, the last groups are the shortest. In contrast, `split` makes the longest group as short as
    possible, and the first groups as long as that allows.
    """
    prefix, total = [0.0, *accumulate(times)], len(times)
    least = [0.0] + [inf] * total  # for the first layers, in the groups made so far
    starts: list[list[int]] = []
    for part in range(1, parts + 1):
        before, least, start_of = least, [inf] * (total + 1), [0] * (total + 1)
        for stop in range(part, total + 1):
            candidates = ((before[i] + (prefix[stop] - prefix[i]) ** 2, -i) for i in range(part - 1, stop))
            least[stop], start = min(candidates)
            start_of[stop] = -start
        starts.append(start_of)
    stops = [total]
    for start_of in reversed(starts[1:]):
        stops.append(start_of[stops[-1]])
    return tuple(reversed(stops))


def gpipe(
    costs: Sequence[LayerCost],
    devices: int,
    micro_batches: int,
    boundary: int = 0,
    *,
    recompute_head: bool = False,
    cut: Cut = split,
) -> Program:
    """One stage per device, all forward, then all backward (Huang et al., 2019)."""
    return looped_bfs(costs, devices, micro_batches, 1, boundary, recompute_head=recompute_head, cut=cut)


def one_f_one_b(
    costs: Sequence[LayerCost],
    devices: int,
    micro_batches: int,
    boundary: int = 0,
    *,
    recompute_head: bool = False,
    cut: Cut = split,
) -> Program:
    """One stage per device; after the warm-up, forward and backward in turn (Harlap et al., 2018)."""

    def order(device: int) -> list[Op]:
        forward = [("F", device, m) for m in range(micro_batches)]
        backward = [("B", device, m) for m in range(micro_batches)]
        return _in_turn(forward, backward, devices - device - 1)

    return _bound(_Layers.of(costs, devices, recompute_head, cut), devices, order, boundary)


def interleaved_1f1b(
    costs: Sequence[LayerCost],
    devices: int,
    micro_batches: int,
    loops: int,
    boundary: int = 0,
    *,
    recompute_head: bool = False,
    cut: Cut = split,
) -> Program:
    """`loops` stages per device, forward and backward in turn (Narayanan et al., 2021); M is a multiple of N."""

    def order(device: int) -> list[Op]:
        forward: list[Op] = []
        backward: list[Op] = []
        for first in range(0, micro_batches, devices):
            group = range(first, first + devices)
            for loop in range(loops):
                forward += [("F", loop * devices + device, m) for m in group]
                backward += [("B", (loops - 1 - loop) * devices + device, m) for m in group]
        return _in_turn(forward, backward, 2 * (devices - device - 1) + (loops - 1) * devices)

    return _bound(_Layers.of(costs, loops * devices, recompute_head, cut), devices, order, boundary)


def looped_bfs(
    costs: Sequence[LayerCost],
    devices: int,
    micro_batches: int,
    loops: int,
    boundary: int = 0,
    *,
    recompute_head: bool = False,
    cut: Cut = split,
) -> Program:
    """`loops` stages per device, each with all micro-batches before the next (Lamy-Poirier, 2023)."""

    def order(device: int) -> list[Op]:
        stages = range(device, loops * devices, devices)
        forward = [("F", stage, m) for stage in stages for m in range(micro_batches)]
        return forward + [("B", stage, m) for stage in reversed(stages) for m in range(micro_batches)]

    return _bound(_Layers.of(costs, loops * devices, recompute_head, cut), devices, order, boundary)


def _in_turn(forward: list[Op], backward: list[Op], warmup: int) -> list[Op]:
    warmup = min(warmup, len(forward))
    steady = zip(forward[warmup:], backward, strict=False)
    return [*forward[:warmup], *chain.from_iterable(steady), *backward[len(forward) - warmup :]]


@dataclass(frozen=True)
class _Layers:
    """The layers, cut into stages, with the times of these schedules."""

    costs: Sequence[LayerCost]
    backward: Sequence[float]
    stages: Sequence[range]

    @classmethod
    def of(cls, costs: Sequence[LayerCost], stages: int, recompute_head: bool, cut: Cut) -> "_Layers":
        *blocks, head = costs
        backward = [*(cost.backward for cost in blocks), head.backward - (0.0 if recompute_head else head.forward)]
        stops = cut([cost.forward + b for cost, b in zip(costs, backward, strict=True)], stages)
        return cls(costs, backward, [range(*span) for span in pairwise((0, *stops))])

    def time(self, kind: str, stage: int) -> float:
        return sum(self.costs[layer].forward if kind == "F" else self.backward[layer] for layer in self.stages[stage])


def _bound(layers: _Layers, devices: int, order: Callable[[int], list[Op]], boundary: int) -> Program:
    """Binds operations to devices, in order. A stage's input is kept from its forward to its backward."""
    stages, costs = layers.stages, layers.costs
    orders = [order(device) for device in range(devices)]
    position = {op: i for i, op in enumerate(chain.from_iterable(orders))}
    tasks: list[Task] = []
    holds: list[Hold] = []
    for device, ops in enumerate(orders):
        first, last = position[ops[0]], position[ops[-1]]
        for i, (kind, stage, m) in enumerate(ops):
            after = [position[ops[i - 1]]] if i else []
            here = position[kind, stage, m]
            if kind == "F":
                if stage:
                    after.append(position["F", stage - 1, m])
                holds.append(Hold(device, boundary, here, position["B", stage, m]))
            else:
                last_stage = stage == len(stages) - 1
                after.append(position["F", stage, m] if last_stage else position["B", stage + 1, m])
                holds.append(Hold(device, sum(costs[layer].kept for layer in stages[stage]), here, here))
            seconds = layers.time(kind, stage)
            tasks.append(Task("compute", device, seconds, tuple(after), kind, stages[stage], micro_batch=m))
        own = [costs[layer] for stage in range(device, len(stages), devices) for layer in stages[stage]]
        holds.append(Hold(device, sum(cost.params + 2 * cost.grads for cost in own), first, last))
    return Program(devices, tuple(tasks), tuple(holds))


@dataclass(frozen=True)
class Best:
    """The shortest step of a schedule."""

    seconds: float
    bubble: float
    loops: int  # stages per device
    cut: str  # "split" or "evenly"
    peak: int  # bytes on the device that needs most: weights, gradients in two forms, and activations


ONCE = {"GPipe": gpipe, "1F1B": one_f_one_b}
LOOPED = {"Interleaved 1F1B": interleaved_1f1b, "Looped BFS": looped_bfs}
CUTS: dict[str, Cut] = {"split": split, "evenly": evenly}
MOST_LOOPS = 12  # stages per device that are tried: the time to simulate a step grows with them
TIE = 1e-9  # relative difference of times that is due to rounding


def best(
    costs: Sequence[LayerCost], devices: int, micro_batches: int, boundary: int = 0, *, recompute_head: bool = False
) -> dict[str, Best]:
    """The best step of each schedule with up to MOST_LOOPS stages per device and either cut; fewer stages win ties.

    Schedules that are not possible are left out: all need a layer per device, and interleaved 1F1B needs a number of
    micro-batches that is a multiple of the number of devices. One device has one stage, since more change nothing.
    """
    most = min(len(costs) // devices, MOST_LOOPS if devices > 1 else 1)
    found: dict[str, Best] = {}
    for loops, (name, cut) in product(range(1, most + 1), CUTS.items()):
        for schedule, program in _programs(costs, devices, micro_batches, boundary, loops, recompute_head, cut):
            timeline = simulate(program)
            known = found.get(schedule)
            if known is None or timeline.makespan < known.seconds * (1 - TIE):
                peak = max(timeline.peak(device) for device in range(devices))
                found[schedule] = Best(timeline.makespan, timeline.bubble(), loops, name, peak)
    return found


def _programs(
    costs: Sequence[LayerCost],
    devices: int,
    micro_batches: int,
    boundary: int,
    loops: int,
    recompute_head: bool,
    cut: Cut,
) -> Iterator[tuple[str, Program]]:
    """The programs of the schedules that are possible with `loops` stages per device, one at a time."""
    if loops == 1:
        for schedule, once in ONCE.items():
            yield schedule, once(costs, devices, micro_batches, boundary, recompute_head=recompute_head, cut=cut)
    for schedule, looped in LOOPED.items():
        if looped is looped_bfs or micro_batches % devices == 0:
            yield (
                schedule,
                looped(costs, devices, micro_batches, loops, boundary, recompute_head=recompute_head, cut=cut),
            )
