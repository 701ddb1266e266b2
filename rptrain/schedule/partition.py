"""The paper's automatic partitioning of layers into forward and backward stages (section 4.4)."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.plan import Stage

SLACK = 1 + 1e-9  # sums of the same times in another order count as equal
WIDER = 1 + 1e-8  # more than SLACK: nothing that counts as equal is left out


def partition(
    costs: Sequence[LayerCost],
    devices: int,
    micro_batches: int,
    fits: Callable[[Stage], bool] = lambda stage: True,
) -> tuple[Stage, ...] | None:
    """Stages that minimize (M S + N (N - 1)) t_max, each of which `fits`; None if a single layer does not fit.

    This is the paper's estimate of the total time of all devices, for S stages of which the longest takes t_max. The
    last layer is the head. t_max is a sum over consecutive layers. For each t_max, stages are packed greedily, the
    fused stage first and as full as possible. Fewer stages need a longer t_max, so bisection finds the least t_max
    for each number of stages, the most promising numbers first, until no other can be better. Ties go to fewer stages,
    which upload parameters less often. If `fits` holds for a stage, it must hold for every part of it.
    """
    packer = Packer(costs, fits)
    if not packer.possible:
        return None
    limits = _limits(costs)
    fewest, most = packer.count(limits[-1]), packer.count(limits[0])
    saved = sorted((cost.forward for cost in costs[:-1]), reverse=True)[: packer.widest_fused]
    work = sum(cost.backward for cost in costs) + sum(cost.forward for cost in costs[:-1]) - sum(saved)
    ramp = devices * (devices - 1)

    def least(count: int) -> float:
        """A lower bound for `count` stages: their times sum to the work, less what fusing can save."""
        return (micro_batches * count + ramp) * max(limits[0], work / count)

    best: tuple[float, int] | None = None
    chosen = limits[-1]
    for count in sorted(range(fewest, most + 1), key=lambda count: (least(count), count)):
        if best is not None and least(count) >= best[0] * SLACK:
            break
        # With other limits, `count` stages are worse; fewer of them are found for their own number.
        if best is not None and packer.count(best[0] * WIDER / (micro_batches * count + ramp)) > count:
            continue
        limit = limits[bisect_left(limits, -count, key=lambda limit: -packer.count(limit))]
        found = packer.count(limit)
        key = (micro_batches * found + ramp) * limit, found
        if best is None or (key[0] < best[0] / SLACK or (key[0] <= best[0] * SLACK and found < best[1])):
            best, chosen = key, limit
    return packer.stages(chosen)


def stage_time(costs: Sequence[LayerCost], stage: Stage) -> float:
    """Time of a stage for one micro-batch."""
    return sum(costs[i].backward if stage.backward else costs[i].forward for i in stage.layers)


def split(times: Sequence[float], parts: int) -> tuple[int, ...]:
    """The ends of `parts` groups of consecutive layers, at least one layer each, with the shortest longest group."""
    prefix, longest = [0.0, *accumulate(times)], max(times)
    even = prefix[-1] / parts
    # The longest group is at least as long as an even one, and exceeds it by less than a layer.
    low, high = max(longest, even) / WIDER, (longest + even) * WIDER
    sums = _sums(prefix, low, high)
    sums = sums[bisect_left(sums, longest / SLACK) :] or [prefix[-1]]

    def cuts(limit: float) -> list[int]:
        """The latest end of each group such that every group that follows still gets a layer."""
        ends: list[int] = []
        for left in range(parts, 0, -1):
            start = ends[-1] if ends else 0
            reach = bisect_right(prefix, prefix[start] + limit * SLACK) - 1
            ends.append(max(start + 1, min(reach, len(times) - left + 1)))
        return ends

    first, last = 0, len(sums) - 1
    while first < last:
        middle = (first + last) // 2
        if cuts(sums[middle])[-1] == len(times):
            last = middle
        else:
            first = middle + 1
    return tuple(cuts(sums[first]))


def _sums(prefix: Sequence[float], low: float, high: float) -> list[float]:
    """The sums over consecutive layers from about `low` to `high`, in increasing order. `prefix`: running sums."""
    ends = np.array(prefix)
    after = np.arange(1, len(ends) + 1)
    begins = np.maximum(np.searchsorted(ends, ends + low / WIDER), after)
    counts = np.maximum(np.searchsorted(ends, ends + high * WIDER, "right") - begins, 0)
    # the stops of all sums, start by start
    stops = np.arange(counts.sum()) + np.repeat(begins - (counts.cumsum() - counts), counts)
    return np.unique(ends[stops] - np.repeat(ends, counts)).tolist()


def _limits(costs: Sequence[LayerCost]) -> list[float]:
    """Every possible t_max that lets the longest layer run, in increasing order."""
    least = max(max(cost.backward for cost in costs), max((cost.forward for cost in costs[:-1]), default=0.0))
    sums = {least}
    for times in ([cost.forward for cost in costs[:-1]], [cost.backward for cost in costs]):
        prefix = [0.0, *accumulate(times)]
        sums.update(total for total in _sums(prefix, least, prefix[-1]) if total > least)
    return sorted(sums)


@dataclass(frozen=True)
class _Reach:
    """How far a stage can extend from each layer: `time` has running sums, `memory` the last stop that fits."""

    time: list[float]
    memory: list[int]

    def stop(self, start: int, limit: float) -> int:
        return min(bisect_right(self.time, self.time[start] + limit) - 1, self.memory[start])


class Packer:
    """Packs stages greedily under a time limit. Backward positions count from the head: 0 is before it."""

    def __init__(self, costs: Sequence[LayerCost], fits: Callable[[Stage], bool]) -> None:
        total = self._total = len(costs)

        def memory(stage: Callable[[int, int], Stage], length: int) -> list[int]:
            """The last stop that fits for each start; never before that of an earlier start."""
            stops, stop = [], 0
            for start in range(length):
                same = start and stage(start, length).kind == stage(start - 1, length).kind
                stop = max(stop, start) if same else start
                while stop < length and fits(stage(start, stop + 1)):
                    stop += 1
                stops.append(stop)
            return stops

        self._forward = _Reach(
            [0.0, *accumulate(cost.forward for cost in costs[:-1])],
            memory(lambda start, stop: Stage("F", start, stop), total - 1),
        )
        self._backward = _Reach(
            [0.0, *accumulate(cost.backward for cost in reversed(costs))],
            memory(lambda start, stop: Stage("B" if start else "FB", total - stop, total - start), total),
        )
        self.widest_fused = self._backward.memory[0] - 1  # layers without the head

    @property
    def possible(self) -> bool:
        """Whether every single layer fits."""
        reaches = (self._forward, self._backward)
        return all(stop > start for reach in reaches for start, stop in enumerate(reach.memory))

    def count(self, limit: float) -> int:
        """The number of stages under a time limit."""
        return sum(map(len, self._cuts(limit)))

    def stages(self, limit: float) -> tuple[Stage, ...]:
        forward, backward = self._cuts(limit)
        stages = [Stage("F", start, stop) for start, stop in zip((0, *forward), forward, strict=False)]
        ends = [self._total - cut for cut in (0, *backward)]
        stages += [Stage("B" if i else "FB", ends[i + 1], ends[i]) for i in range(len(backward))]
        return tuple(stages)

    def _cuts(self, limit: float) -> tuple[list[int], list[int]]:
        """Stops of the forward stages, and stops of the fused and backward stages, counted from the head."""
        limit *= SLACK
        backward = [self._backward.stop(0, limit)]
        while backward[-1] < self._total:
            backward.append(self._backward.stop(backward[-1], limit))
        forward: list[int] = []
        start, body = 0, self._total - backward[0]
        while start < body:
            start = min(self._forward.stop(start, limit), body)
            forward.append(start)
        return forward, backward
