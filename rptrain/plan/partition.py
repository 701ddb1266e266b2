"""Automatic partitioning: layer times and memory to forward and backward stages (paper section 4.4)."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from rptrain.plan.schedule import Stage


@dataclass(frozen=True)
class LayerCost:
    """Time of a layer for one micro-batch, in any one unit; `backward` includes the recomputed forward."""

    forward: float
    backward: float


def partition(
    costs: Sequence[LayerCost],
    devices: int,
    micro_batches: int,
    fits: Callable[[Stage], bool] = lambda stage: True,
) -> tuple[Stage, ...] | None:
    """Stages that minimise (M S + N (N - 1)) t_max, each of which `fits`; None where a single layer does not.

    The last layer is the head. t_max is one of the sums over consecutive layers; for each, stages are packed
    greedily, the fused stage first and as full as possible. Ties go to fewer stages, which move parameters less
    often. `fits` must hold for every part of a stage for which it holds.
    """
    best: tuple[float, int] | None = None
    chosen: tuple[Stage, ...] | None = None
    fits = cache(fits)
    for t_max in _candidates(costs):
        stages = _pack(costs, t_max, fits)
        if stages is None:
            return None
        key = objective(costs, stages, devices, micro_batches), len(stages)
        if best is None or key < best:
            best, chosen = key, stages
    return chosen


def objective(costs: Sequence[LayerCost], stages: Sequence[Stage], devices: int, micro_batches: int) -> float:
    """The paper's estimate of the devices' time together: (M S + N (N - 1)) t_max, t_max the longest stage's."""

    def time(stage: Stage) -> float:
        return sum(costs[i].backward if stage.backward else costs[i].forward for i in stage.layers)

    return (micro_batches * len(stages) + devices * (devices - 1)) * max(map(time, stages))


def _candidates(costs: Sequence[LayerCost]) -> list[float]:
    """Every possible t_max that lets the longest layer run, in increasing order."""
    least = max(max(cost.backward for cost in costs), max((cost.forward for cost in costs[:-1]), default=0.0))
    sums = set()
    for times in ([cost.forward for cost in costs[:-1]], [cost.backward for cost in costs]):
        prefix = [0.0, *accumulate(times)]
        for stop in range(1, len(prefix)):
            for start in range(stop):
                sums.add(float(f"{prefix[stop] - prefix[start]:.9g}"))  # equal layers give equal sums
    return sorted(total for total in sums if total >= least * (1 - 1e-8))


def _pack(costs: Sequence[LayerCost], t_max: float, fits: Callable[[Stage], bool]) -> tuple[Stage, ...] | None:
    limit, total = t_max * (1 + 1e-8), len(costs)

    def longest(prefix: list[float], start: int, stop: int, stage: Callable[[int], Stage]) -> Stage | None:
        """The longest stage from `start` on, within the time and the memory."""
        end = min(max(bisect_right(prefix, prefix[start] + limit) - 1, start + 1), stop)
        return next((stage(e) for e in range(end, start, -1) if fits(stage(e))), None)

    forward = [0.0, *accumulate(cost.forward for cost in costs)]
    backward = [0.0, *accumulate(cost.backward for cost in reversed(costs))]
    fused = longest(backward, 0, total, lambda end: Stage("FB", total - end, total))
    if fused is None:
        return None
    stages: list[Stage] = []
    start = 0
    while start < fused.start:
        stage = longest(forward, start, fused.start, lambda end, start=start: Stage("F", start, end))
        if stage is None:
            return None
        stages.append(stage)
        start = stage.stop
    stages.append(fused)
    while stages[-1].start:
        start = stages[-1].start
        stage = longest(backward, total - start, total, lambda end, start=start: Stage("B", total - end, start))
        if stage is None:
            return None
        stages.append(stage)
    return tuple(stages)
