"""An estimate of a plan's step time from one pass over its slots, fast enough for a search."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from rptrain.schedule.coarse import MOST_TURNS, shortened
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
    return Estimator(costs, setting).estimate(stages)


class Estimator:
    """Estimates of many plans with the same costs and the same setting. What it computes of a stage it keeps."""

    def __init__(self, costs: Sequence[LayerCost], setting: Setting) -> None:
        rounds, most = setting.micro_batches // setting.round_size, MOST_TURNS * setting.groups
        self._factor = max(1.0, rounds / most)  # the other rounds repeat these
        if rounds > most:
            costs, setting = (
                shortened(costs, self._factor),
                replace(setting, micro_batches=most * setting.round_size),
            )
        self._costs, self._setting = costs, setting
        self._updates = [0.0, *accumulate(cost.renewal for cost in costs)]
        self._read = list(accumulate(cost.renewal for cost in reversed(costs)))[::-1]
        self._alone = cache(self._of_stage)
        # In sync, every step starts when the previous one has ended, so all steps are alike. In async, the first slot
        # of a step runs on a different device each time, and on the first again after N steps. Of the two steps in
        # progress, the later one may end with the earlier, so an even number is measured; the first steps can be
        # different.
        self._warm_up, self._measured = (0, 1) if setting.lag == 0 else (2 * setting.devices, 2 * setting.devices)

    def estimate(self, stages: Sequence[Stage]) -> Estimate:
        """As the function `estimate`."""
        setting, updates = self._setting, self._updates[-1]
        known = [self._alone(stage) for stage in stages]
        paces, hops = self._paces(stages, known)
        last = setting.round_size - 1
        slots = [_Slot(one, last * pace, hop) for one, pace, hop in zip(known, paces, hops, strict=True)]
        summation = sum(one.summation for one in known if one.backward)
        run = _steps if _library() is None else _native_steps
        ends, free = run(slots, setting, self._warm_up + self._measured, updates, summation)
        began = ends[self._warm_up - 1] if self._warm_up else 0.0
        period = max((ends[-1] - began) / self._measured, summation + updates)
        busy = setting.micro_batches * sum(one.time for one in known)
        bubble, tail = 1 - busy / (setting.devices * period), sum(free) / setting.devices - ends[-1]
        return Estimate(period * self._factor, bubble, tail)

    def _of_stage(self, stage: Stage) -> "_Alone":
        costs, setting, links = [self._costs[i] for i in stage.layers], self._setting, self._setting.links
        gradients = None
        if links is not None and stage.backward and any(cost.grads or cost.sums for cost in costs):
            gradients = _Gradients(
                sum(cost.grads for cost in costs) / links.down,
                costs[0].grads / links.down,
                sum(cost.sums for cost in costs) / links.up,
                self._read[stage.start],
            )
        return _Alone(
            stage_time(self._costs, stage),
            self._updates[stage.stop] if setting.lag == 0 else self._updates[-1],
            sum(cost.params for cost in costs) / setting.round_size,
            sum(cost.grads for cost in costs) / setting.round_size if stage.backward else 0.0,
            sum(cost.summation for cost in costs) if stage.backward else 0.0,
            stage.backward,
            gradients,
        )

    def _paces(self, stages: Sequence[Stage], known: Sequence["_Alone"]) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds between micro-batches of each stage, and from the previous stage to it."""
        links, count, n = self._setting.links, len(stages), self._setting.devices
        if links is None:
            return [one.time for one in known], [0.0] * count
        paces, hops = [], []
        sent = 0
        for s, (stage, written) in enumerate(zip(stages, outputs(stages)[0], strict=True)):
            up = links.boundary * (2 if stage.kind == "B" else 1) / links.up + links.latency
            hops.append(sent / links.down + (up + links.latency if s else up))
            sent = links.boundary * written
            down = sent / links.down + links.latency
            following, before = known[(s + n) % count].params, known[(s - n) % count].grads
            paces.append(max(known[s].time, up + following / links.up, down + before / links.down))
        return paces, hops


class _Gradients(NamedTuple):
    """Seconds for the transfers of a stage's gradients."""

    down: float
    last: float  # the part of `down` for the last layer
    sums: float  # upload in a later round
    read: float  # from the start of an update until all versions are there; async, the last layers first


class _Alone(NamedTuple):
    """What an estimate needs of a stage, whatever the other stages are. Times are in seconds."""

    time: float  # of a micro-batch
    ready: float  # from the start of an update until its parameters are there
    params: float  # bytes for each micro-batch
    grads: float
    summation: float  # of its gradients over all processes
    backward: bool
    gradients: _Gradients | None  # None without trained weights in backward, and if transfers take no time


class _Slot(NamedTuple):
    """A stage in a plan: `span` from its first micro-batch's end to its last, `hop` from the previous stage to it."""

    stage: _Alone
    span: float
    hop: float


def _steps(
    slots: Sequence[_Slot], setting: Setting, steps: int, updates: float, summation: float
) -> tuple[Sequence[float], Sequence[float]]:
    """When each step ends, and when each device is free after the last. `updates` and `summation`: seconds of a step's
    optimizer. It is `schedule_steps` of estimate.c, to the bit.
    """
    n, rounds = setting.devices, setting.micro_batches // setting.round_size
    per_round = [(s, *slot.stage[:2], *slot[1:], slot.stage.gradients) for s, slot in enumerate(slots)]
    sums = [(s, slot.stage.summation) for s, slot in enumerate(slots) if slot.stage.backward]
    # When a device is free, and when its last gradients, and those before them, were downloaded.
    free, gone, freed = [0.0] * n, [0.0] * n, [0.0] * n
    # When a stage's gradients were downloaded in the group's previous round.
    left = [[0.0] * len(slots) for _ in range(setting.groups)]
    arrived = [0.0] * len(slots)  # when its gradients were there in the last round
    device, end = 0, 0.0
    ends: list[float] = []
    # When the update before a step (sync), or before the previous step (async), began; step 0 has none.
    optimizer = [0.0, -updates]
    for iteration in range(steps):
        version = optimizer[iteration] if setting.lag == 0 or iteration > 1 else -inf
        for r in range(rounds):
            of_group, later = left[r % setting.groups], r >= setting.groups
            first = end = 0.0
            for s, time, ready, span, hop, moved in per_round:  # comparisons: max() takes most of the time
                start = free[device]
                if moved is not None:
                    if freed[device] > start:
                        start = freed[device]
                    if later:
                        start = max(start, of_group[s]) + moved.sums
                if first + hop > start:
                    start = first + hop
                if version + ready > start:
                    start = version + ready
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
        summed = optimizer[-1] + updates
        if summation:
            for s, seconds in sums:
                summed = max(summed, arrived[s]) + seconds
        ends.append(max(*free, *gone, summed if summation else 0.0) if setting.lag == 0 else end)
        optimizer.append(max(ends[-1], *gone, summed))
    return ends, free


@cache
def _library() -> Any:
    """estimate.c, with the types of its function; None if the package was installed without a compiler, or if the
    library cannot be loaded, which utils/native.py reports for the others.
    """
    try:
        found = ctypes.CDLL(str(Path(__file__).with_name("_estimate.so")))
    except OSError:
        return None
    numbers, pointer = [ctypes.c_long] * 6, ctypes.c_void_p
    found.schedule_steps.argtypes = [*numbers, pointer, ctypes.c_double, ctypes.c_double, pointer, pointer]
    found.schedule_steps.restype = None
    return found


NO_GRADIENTS = _Gradients(0.0, 0.0, 0.0, 0.0)


def _native_steps(
    slots: Sequence[_Slot], setting: Setting, steps: int, updates: float, summation: float
) -> tuple[Sequence[float], Sequence[float]]:
    """As `_steps`, in C."""
    n, groups = setting.devices, setting.groups
    fields = array("d")
    for (time, ready, _, _, own, backward, moved), span, hop in slots:
        fields.extend((time, span, hop, ready, *(moved or NO_GRADIENTS), own, moved is not None, backward))
    work = array("d", bytes(8 * (3 * n + (groups + 1) * len(slots) + steps + 2)))
    ends = array("d", bytes(8 * steps))
    _library().schedule_steps(
        n,
        setting.micro_batches // setting.round_size,
        groups,
        setting.lag,
        steps,
        len(slots),
        fields.buffer_info()[0],
        updates,
        summation,
        work.buffer_info()[0],
        ends.buffer_info()[0],
    )
    return ends, work[:n]
