"""An estimate of a plan's step time from one pass over its slots, fast enough for a search."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import Links
from rptrain.schedule.lower import outputs
from rptrain.schedule.partition import stage_time
from rptrain.schedule.plan import Stage


@dataclass(frozen=True)
class Setting:
    """The setting of an estimate: N devices, M micro-batches in rounds of M_R; `lag` is 1 in async, 0 in sync."""

    devices: int
    micro_batches: int
    round_size: int
    lag: int
    links: Links | None = None  # None: transfers take no time
    groups: int = 1  # groups of replicas that a device computes in turn; each has partial sums of its own


@dataclass(frozen=True)
class Estimate:
    """Seconds per step, and the fraction in which devices do not compute, in the steady state.

    `tail` ranks plans of the same period: when the devices finish on average, relative to the last step's end.
    """

    period: float
    bubble: float
    tail: float


def estimate(costs: Sequence[LayerCost], stages: Sequence[Stage], setting: Setting) -> Estimate:
    """The steady-state period of a step.

    All micro-batches of a stage take the same time, so their end times are convex in their number, and the first and
    the last end are sufficient: a slot's last micro-batch ends one micro-batch after the previous slot's last, or a
    whole slot after its own first. Without links this is exact. With links, a micro-batch takes as long as the slowest
    of computation, upload and download, where the links carry the parameters of the device's next stage and the
    gradients of its previous one. Copies in the idle time between two slots are not counted. Gradients are downloaded
    once the update has read the previous ones. The device's next backward stage but one, the upload of partial sums in
    a later round and the start of the optimizer come after that. Activations delay neither direction. The optimizer's
    thread sums gradients over all processes as the stages of the last round leave them, and then updates.
    """
    n, rounds, last = setting.devices, setting.micro_batches // setting.round_size, setting.round_size - 1
    times = [stage_time(costs, stage) for stage in stages]
    paces, hops = _paces(costs, stages, times, setting)
    updates = [0.0, *accumulate(cost.renewal for cost in costs)]
    sums = [(s, sum(costs[i].summation for i in stage.layers)) for s, stage in enumerate(stages) if stage.backward]
    summation = sum(seconds for _, seconds in sums)
    ready = [updates[stage.stop] if setting.lag == 0 else updates[-1] for stage in stages]
    spans = [last * pace for pace in paces]
    per_round = list(enumerate(zip(times, spans, hops, ready, _gradients(costs, stages, setting), strict=True)))
    # In sync, every step starts when the previous one has ended, so all steps are alike. In async, the first slot of
    # a step runs on a different device each time, and on the first again after N steps. Of the two steps in progress,
    # the later one may end with the earlier, so an even number is measured; the first steps can be different.
    warm_up, measured = (0, 1) if setting.lag == 0 else (2 * n, 2 * n)
    # When a device is free, and when its last gradients, and those before them, were downloaded.
    free, gone, freed = [0.0] * n, [0.0] * n, [0.0] * n
    # When a stage's gradients were downloaded in the group's previous round.
    left = [[0.0] * len(stages) for _ in range(setting.groups)]
    arrived = [0.0] * len(stages)  # when its gradients were there in the last round
    device, end = 0, 0.0
    ends: list[float] = []
    # When the update before a step (sync), or before the previous step (async), began; step 0 has none.
    optimizer = [0.0, -updates[-1]]
    for iteration in range(warm_up + measured):
        version = optimizer[iteration] if setting.lag == 0 or iteration > 1 else -inf
        for r in range(rounds):
            of_group, later = left[r % setting.groups], r >= setting.groups
            first = end = 0.0
            for s, (time, span, hop, update, moved) in per_round:  # comparisons: max() takes most of the search's time
                start = free[device]
                if moved is not None:
                    if freed[device] > start:
                        start = freed[device]
                    if later:
                        start = max(start, of_group[s]) + moved.sums
                if first + hop > start:
                    start = first + hop
                if version + update > start:
                    start = version + update
                first = start + time
                end = end + hop + time
                if first + span > end:
                    end = first + span
                if moved is not None:
                    freed[device] = gone[device]
                    read = optimizer[iteration + 1] + moved.read if iteration else 0.0
                    of_group[s] = gone[device] = max(max(end, gone[device]) + moved.down, read + moved.last)
                arrived[s] = end if moved is None else gone[device]
                free[device] = end
                device = device + 1 if device + 1 < n else 0
        summed = optimizer[-1] + updates[-1]
        if summation:
            for s, seconds in sums:
                summed = max(summed, arrived[s]) + seconds
        ends.append(max(*free, *gone, summed if summation else 0.0) if setting.lag == 0 else end)
        optimizer.append(max(ends[-1], *gone, summed))
    period = max((ends[-1] - (ends[warm_up - 1] if warm_up else 0.0)) / measured, summation + updates[-1])
    return Estimate(period, 1 - setting.micro_batches * sum(times) / (n * period), sum(free) / n - ends[-1])


@dataclass(frozen=True)
class _Gradients:
    """Seconds for the transfers of a stage's gradients."""

    down: float
    last: float  # the part of `down` for the last layer
    sums: float  # upload in a later round
    read: float  # from the start of an update until all versions are there; async, the last layers first


def _gradients(costs: Sequence[LayerCost], stages: Sequence[Stage], setting: Setting) -> Sequence[_Gradients | None]:
    """The times of each stage; None for stages without trained weights in backward, and if transfers take no time."""
    links = setting.links
    if links is None:
        return [None] * len(stages)
    read = list(accumulate(cost.renewal for cost in reversed(costs)))[::-1]
    return [
        _Gradients(
            sum(costs[i].grads for i in stage.layers) / links.down,
            costs[stage.start].grads / links.down,
            sum(costs[i].sums for i in stage.layers) / links.up,
            read[stage.start],
        )
        if stage.backward and any(costs[i].grads or costs[i].sums for i in stage.layers)
        else None
        for stage in stages
    ]


def _paces(
    costs: Sequence[LayerCost], stages: Sequence[Stage], times: Sequence[float], setting: Setting
) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds between micro-batches of each stage, and from the previous stage to it."""
    links, count = setting.links, len(stages)
    if links is None:
        return times, [0.0] * count
    params = [sum(costs[i].params for i in stage.layers) / setting.round_size for stage in stages]
    grads = [
        sum(costs[i].grads for i in stage.layers) / setting.round_size if stage.backward else 0.0 for stage in stages
    ]
    paces, hops = [], []
    sent = 0
    for s, (stage, written) in enumerate(zip(stages, outputs(stages)[0], strict=True)):
        up = links.boundary * (2 if stage.kind == "B" else 1) / links.up + links.latency
        hops.append(sent / links.down + (up + links.latency if s else up))
        sent = links.boundary * written
        down = sent / links.down + links.latency
        following, before = params[(s + setting.devices) % count], grads[(s - setting.devices) % count]
        paces.append(max(times[s], up + following / links.up, down + before / links.down))
    return paces, hops
