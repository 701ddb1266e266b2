"""The time of a step under a plan, from one pass over its slots: quick enough to search plans with."""

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
    """What a plan is judged for: N devices, M micro-batches in rounds of M_R; `lag` is 1 in async, 0 in sync."""

    devices: int
    micro_batches: int
    round_size: int
    lag: int
    links: Links | None = None  # None: transfers take no time


@dataclass(frozen=True)
class Estimate:
    """Seconds a step and the share of it in which devices do not compute, in the long run.

    `tail` tells plans of the same period apart: when the devices are done on average, after the last step's end.
    """

    period: float
    bubble: float
    tail: float


def estimate(costs: Sequence[LayerCost], stages: Sequence[Stage], setting: Setting) -> Estimate:
    """The long-run period of a step.

    All micro-batches of a stage take the same time, so the times at which they end are convex in their number, and
    the first and the last end say all: a slot's last micro-batch ends one micro-batch after that of the slot before,
    or a whole slot after its own first. Without links this is exact. With links a micro-batch takes as long as the
    slowest of computation, link up and link down, which carry the parameters of the device's next stage and the
    gradients of the one before; what a link does in the idle time between two slots is not counted. Gradients go down
    once the update has read the ones before; the device's next backward stage ends, the stage's partial sums of a
    later round come up, and the optimizer starts, behind that. Activations do not hold up either way here.
    """
    n, rounds, last = setting.devices, setting.micro_batches // setting.round_size, setting.round_size - 1
    times = [stage_time(costs, stage) for stage in stages]
    paces, hops = _paces(costs, stages, times, setting)
    updates = [0.0, *accumulate(cost.update for cost in costs)]
    ready = [updates[stage.stop] if setting.lag == 0 else updates[-1] for stage in stages]
    spans = [last * pace for pace in paces]
    per_round = list(enumerate(zip(times, spans, hops, ready, _gradients(costs, stages, setting), strict=True)))
    # In sync every step starts where the one before has ended, so one is like all; in async the first slot of a step
    # falls on another device each time, and after N steps on the first again. Of the two steps under way the later one
    # may end with the earlier, so an even number is measured; the first ones are at times not as those that follow.
    warm_up, measured = (0, 1) if setting.lag == 0 else (2 * n, 2 * n)
    free, gone = [0.0] * n, [0.0] * n  # when a device is, and when its last gradients were downloaded
    left = [0.0] * len(stages)  # when a stage's gradients were downloaded in the round before
    device, end = 0, 0.0
    ends: list[float] = []
    # When the update before a step began (sync), or that before the last one (async); the one before all was over.
    optimizer = [0.0, -updates[-1]]
    for iteration in range(warm_up + measured):
        version = optimizer[iteration] if setting.lag == 0 or iteration > 1 else -inf
        for r in range(rounds):
            first = end = 0.0
            for s, (time, span, hop, update, moved) in per_round:  # comparisons: max() takes most of the search's time
                start = free[device]
                if r and moved is not None:
                    start = max(start, left[s]) + moved.sums
                if first + hop > start:
                    start = first + hop
                if version + update > start:
                    start = version + update
                first = start + time
                end = end + hop + time
                if first + span > end:
                    end = first + span
                if moved is not None:
                    if gone[device] + time > end:
                        end = gone[device] + time
                    read = optimizer[iteration + 1] + moved.read if iteration else 0.0
                    left[s] = gone[device] = max(end + moved.down, read + moved.last)
                free[device] = end
                device = device + 1 if device + 1 < n else 0
        ends.append(max(*free, *gone) if setting.lag == 0 else end)
        optimizer.append(max(ends[-1], *gone, optimizer[-1] + updates[-1]))
    period = max((ends[-1] - (ends[warm_up - 1] if warm_up else 0.0)) / measured, updates[-1])
    return Estimate(period, 1 - setting.micro_batches * sum(times) / (n * period), sum(free) / n - ends[-1])


@dataclass(frozen=True)
class _Gradients:
    """Seconds that the gradients of a stage take."""

    down: float
    last: float  # of `down`, for the layer that goes last
    sums: float  # up again in a later round
    read: float  # from the start of an update until it has read them all: async, the last layers first


def _gradients(costs: Sequence[LayerCost], stages: Sequence[Stage], setting: Setting) -> Sequence[_Gradients | None]:
    """Of each stage; None for forward stages, and where transfers take no time."""
    links = setting.links
    if links is None:
        return [None] * len(stages)
    read = list(accumulate(cost.update for cost in reversed(costs)))[::-1]
    return [
        _Gradients(
            sum(costs[i].grads for i in stage.layers) / links.down,
            costs[stage.start].grads / links.down,
            sum(costs[i].sums for i in stage.layers) / links.up,
            read[stage.start],
        )
        if stage.backward
        else None
        for stage in stages
    ]


def _paces(
    costs: Sequence[LayerCost], stages: Sequence[Stage], times: Sequence[float], setting: Setting
) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds between micro-batches of each stage, and from the stage before to it."""
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
