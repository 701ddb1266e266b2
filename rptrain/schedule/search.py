"""A search for the partition with the shortest estimated step: many cuts are estimated, and the best are refined."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.estimate import Estimate, Estimator, Setting
from rptrain.schedule.partition import partition, split
from rptrain.schedule.plan import Stage

Fits = Callable[[Sequence[Stage]], bool]

STARTS = 4  # partitions of each kind of ends to refine
REFINEMENTS = 500  # neighbors to evaluate for each of them
FEW = 100  # neighbors to evaluate in a short search
TIE = 1e-6  # relative difference below which plans count as equally fast; the one with fewer stages wins


class Cuts(NamedTuple):
    """A partition, given by the ends of its stages inside the body (the layers before the fused stage)."""

    body: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def stages(self, layers: int) -> tuple[Stage, ...]:
        def spans(cuts: tuple[int, ...]) -> list[tuple[int, int]]:
            return list(pairwise((0, *cuts, self.body))) if self.body else []

        forward = [Stage("F", *span) for span in spans(self.forward)]
        backward = [Stage("B", *span) for span in reversed(spans(self.backward))]
        return (*forward, Stage("FB", self.body, layers), *backward)

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> "Cuts":
        forward = tuple(stage.stop for stage in stages if stage.kind == "F")[:-1]
        backward = tuple(sorted(stage.start for stage in stages if stage.kind == "B"))[1:]
        return cls(next(stage.start for stage in stages if stage.kind == "FB"), forward, backward)


@dataclass(frozen=True)
class Found:
    """The best partition and its estimate."""

    stages: tuple[Stage, ...]
    estimate: Estimate


def search(
    costs: Sequence[LayerCost],
    setting: Setting,
    fits: Fits = lambda stages: True,
    *,
    by: Callable[[Estimate], float] = lambda found: found.period,
    near: Sequence[Stage] | None = None,
) -> Found | None:
    """The stages with the shortest estimated step, or the least of `by`, among those for which `fits` holds.

    None if single layers do not fit. The paper's partition (section 4.4) is the first candidate if its stages fit
    together. The others are even cuts for every size of the fused stage and many numbers of stages; in sync also with
    stages of one layer at both ends, which fill and drain the pipeline quickly. The best few are refined by moving,
    joining and splitting stages as long as that helps. If `fits` holds for a partition, it must hold for finer ones;
    it is also called with single stages.

    `near` makes the search short: only the best candidate is refined, by FEW evaluations. The stages in `near`, which
    were found with other costs, are a candidate too; the others have as many stages of one layer at the ends.
    """
    layers = len(costs)
    estimator = Estimator(costs, setting)
    seen: dict[Cuts, tuple[float, float]] = {}
    never = (float("inf"), 0.0)

    def value(cuts: Cuts) -> tuple[float, float]:
        """The objective: `by`, and then when the devices finish, which breaks ties on plateaus."""
        if cuts not in seen:
            stages = cuts.stages(layers)
            seen[cuts] = never
            if fits(stages):
                found = estimator.estimate(stages)
                seen[cuts] = float(f"{by(found):.9g}"), found.tail
        return seen[cuts]

    kinds: dict[int, set[Cuts]] = defaultdict(set)
    ramps = [0, setting.devices // 2, setting.devices - 1] if setting.lag == 0 and setting.devices > 1 else [0]
    others = []
    if near is not None:
        own = Cuts.of(near)
        ramps = [ramp for ramp in ramps if own.forward[:ramp] == tuple(range(1, ramp + 1))][-1:]
        others.append((0, own))
    for ramp, cuts in (*others, *_candidates(costs, setting, fits, ramps)):
        if value(cuts) is not never:
            kinds[ramp].add(cuts)
    if not kinds:  # stages of one layer at both ends leave some partitions out
        return None if near is None else search(costs, setting, fits, by=by)
    best = [cuts for kind in kinds.values() for cuts in sorted(kind, key=lambda cuts: seen[cuts])[:STARTS]]
    if near is not None:
        best = [min(best, key=lambda cuts: seen[cuts])]
    least = min(seen[_refined(cuts, layers, value, None if near is None else FEW)][0] for cuts in best)
    chosen = min(
        (cuts for cuts in seen if seen[cuts][0] <= least + TIE * abs(least)),
        key=lambda cuts: (len(cuts.forward) + len(cuts.backward), seen[cuts]),
    )
    stages = chosen.stages(layers)
    return Found(stages, estimator.estimate(stages))


def _candidates(
    costs: Sequence[LayerCost], setting: Setting, fits: Fits, ramps: Sequence[int]
) -> Iterator[tuple[int, Cuts]]:
    """Partitions, each with the number of its single-layer stages at both ends, one of `ramps`."""
    layers = len(costs)
    papers = partition(costs, setting.devices, setting.micro_batches, lambda stage: fits((stage,)))
    if papers is not None:
        yield 0, Cuts.of(papers)
    forward, backward = [cost.forward for cost in costs], [cost.backward for cost in costs]
    for fused in _steps(layers):
        body = layers - fused
        if not body:
            yield 0, Cuts(0, (), ())
            continue
        for count in (-(-body // size) for size in _steps(body)):
            for ramp in (r for r in ramps if r + count <= body):
                ends = tuple(range(1, ramp + 1))
                down = ends + tuple(ramp + cut for cut in split(backward[ramp:body], count)[:-1])
                target = max(sum(backward[ramp:body]) / count, 1e-30)
                even = max(1, min(round(sum(forward[ramp:body]) / target), body - ramp))
                for stages in {even, min(even + 1, body - ramp), count}:
                    up = ends + tuple(ramp + cut for cut in split(forward[ramp:body], stages)[:-1])
                    yield ramp, Cuts(body, up, down)


def _steps(most: int) -> list[int]:
    """1, 2, 3, …, 8, and then steps of a quarter up to `most`."""
    steps, step = [], 1
    while step < most:
        steps.append(step)
        step = max(step + 1, step * 5 // 4)
    return [*steps, most]


def _refined(cuts: Cuts, layers: int, value: Callable[[Cuts], tuple[float, float]], most: int | None) -> Cuts:
    """The local optimum near a partition, or the best one after `most` evaluations.

    None: after REFINEMENTS, and then until all neighbors of the last improvement are evaluated.
    """
    looks = 0
    improved = True
    while improved and looks < (REFINEMENTS if most is None else most):
        improved = False
        for neighbor in islice(_neighbors(cuts, layers), None if most is None else most - looks):
            looks += 1
            if value(neighbor) < value(cuts):
                cuts, improved = neighbor, True
                break
    return cuts


def _neighbors(cuts: Cuts, layers: int) -> Iterator[Cuts]:
    """Variants: the fused stage one layer longer or shorter, an end moved by 1 or 2 layers, stages joined or split."""
    for body in (cuts.body - 1, cuts.body + 1):
        if 0 <= body < layers:
            yield Cuts(body, *(tuple(c for c in part if c < body) for part in (cuts.forward, cuts.backward)))
    for backward, part in ((False, cuts.forward), (True, cuts.backward)):
        for changed in _changes(part, cuts.body):
            yield Cuts(cuts.body, cuts.forward, changed) if backward else Cuts(cuts.body, changed, cuts.backward)


def _changes(part: tuple[int, ...], body: int) -> Iterator[tuple[int, ...]]:
    edges = (0, *part, body)
    for i, cut in enumerate(part):
        for moved in (cut - 1, cut + 1, cut - 2, cut + 2):
            if edges[i] < moved < edges[i + 2]:
                yield (*part[:i], moved, *part[i + 1 :])
        yield part[:i] + part[i + 1 :]
    for i, (start, stop) in enumerate(pairwise(edges)):
        if stop - start > 1:
            yield (*part[:i], (start + stop) // 2, *part[i:])
