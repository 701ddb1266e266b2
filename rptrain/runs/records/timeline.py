"""When each device computes which slot of a step: as measured, and as planned.

Devices work on two steps at a time in async, so a timeline shows not the computation of one step but a window that is
as long as a step: from the end of the step before to the end of the step.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from typing import Annotated, NamedTuple

from pydantic import Field

from rptrain.runs.records.fields import Float, Int
from rptrain.schedule.plan import Computation

PAIRED = 2.0  # ratio of the durations of two steps from which they end in pairs
CELLS = 200  # equal parts of a window: gaps shorter than a cell are not recorded, nor more spans of a device than cells


class SlotSpan(NamedTuple):
    """A device computes a slot, or a part of it. `slot`: its number within its step."""

    slot: Int
    start: Float  # seconds from the start of the window
    end: Float


@dataclass(frozen=True)
class StepTimeline:
    """What each device computes in a window of `seconds`, in order of time, and the share of it in which it does.

    The window is a step, or two steps that end in a pair.
    """

    iteration: Int  # that ends with the window, counted from 0 since the engine was opened
    seconds: Annotated[Float, Field(gt=0)]
    busy: tuple[Float, ...]  # by device
    devices: tuple[tuple[SlotSpan, ...], ...]
    step: Int | None = None  # that ends with the window, counted from 1; None in a plan
    steps: Annotated[Int, Field(ge=1)] = 1  # that the window has

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def busy_share(self) -> float:
        """The average of all devices."""
        return sum(self.busy) / max(len(self.busy), 1)


@dataclass(frozen=True)
class Schedule:
    """The simulated step of a plan. `stages`: such as "F0-3", in dispatch order; slot s has stage s mod their number.

    The slots of iteration n run `n * shift` devices further than those of iteration 0, in groups of `width` devices.
    """

    stages: tuple[str, ...]
    width: Int
    shift: Int
    step: StepTimeline

    def at(self, iteration: int) -> StepTimeline:
        """The planned step with the devices of another iteration."""
        step, width = self.step, self.width
        moved = (iteration - step.iteration) * self.shift
        if width < 1 or len(step.devices) % width:  # another program wrote it
            return step
        order = [at - at % width + (at - moved) % width for at in range(len(step.devices))]
        busy = tuple(step.busy[device] for device in order) if len(step.busy) == len(order) else step.busy
        return replace(step, iteration=iteration, busy=busy, devices=tuple(step.devices[device] for device in order))


def window(devices: Sequence[Iterable[Computation]], iteration: int, step: int | None = None) -> StepTimeline | None:
    """The window of an iteration, of which all computations are given, as are those of its neighbors that overlap it.

    Two iterations share a window if they end in pairs, as some plans have it in async. The window of the first
    iteration begins with its first computation. None if the iteration, or the one before, has no computations.
    """
    known = [[*lane] for lane in devices]
    ends: dict[int, float] = {}
    for one in (one for lane in known for one in lane):
        ends[one.iteration] = max(one.end, ends.get(one.iteration, one.end))
    if iteration not in ends or (iteration > 0 and iteration - 1 not in ends):
        return None
    end, steps = ends[iteration], 1
    if iteration == 0:
        start = min(one.start for lane in known for one in lane if one.iteration == iteration)
    elif _end_in_pairs(ends, iteration):
        start, steps = ends[iteration - 2], 2
    else:
        start = ends[iteration - 1]
    seconds = end - start
    if seconds <= 0:
        return None
    inside = [[_cut(one, start, end) for one in lane if one.end > start and one.start < end] for lane in known]
    busy = tuple(round(min(sum(one.end - one.start for one in lane) / seconds, 1.0), 4) for lane in inside)
    blocks = tuple(_spans(seconds / CELLS, lane) for lane in inside)
    return StepTimeline(iteration, round(seconds, 6), busy, blocks, step, steps)


def _end_in_pairs(ends: Mapping[int, float], iteration: int) -> bool:
    """Whether steps up to this one took long and short times in turn."""
    if any(iteration - back not in ends for back in range(5)):
        return False
    last, before, *earlier = (ends[iteration - back] - ends[iteration - back - 1] for back in range(4))
    return not _alike(last, before) and _alike(last, earlier[0]) and _alike(before, earlier[1])


def _alike(one: float, other: float) -> bool:
    """Whether two durations differ by less than a factor of PAIRED."""
    return max(one, other) <= PAIRED * min(one, other)


def _cut(one: Computation, start: float, end: float) -> Computation:
    """The part of a computation in a window, with times from the window's start."""
    return one._replace(start=max(one.start, start) - start, end=min(one.end, end) - start)


def _spans(gap: float, lane: Sequence[Computation]) -> tuple[SlotSpan, ...]:
    """The computations of a device in order. Two of the same slot are joined if less than `gap` seconds lie between.

    More than CELLS of them are sampled.
    """
    joined: list[Computation] = []
    for one in sorted(lane, key=lambda one: one.start):
        last = joined[-1] if joined else None
        if last is not None and last[:2] == one[:2] and one.start - last.end < gap:
            joined[-1] = last._replace(end=max(one.end, last.end))
        else:
            joined.append(one)
    spans = [SlotSpan(one.slot, one.start, one.end) for one in joined]
    if len(spans) > CELLS:
        spans = list(_sampled(gap, spans))
    return tuple(SlotSpan(slot, round(start, 6), round(end, 6)) for slot, start, end in spans)


def _sampled(length: float, spans: Sequence[SlotSpan]) -> Iterator[SlotSpan]:
    """At most CELLS spans in place of all. Time is divided into cells of `length` seconds. A cell shows the slot that
    takes most of it, or nothing if the device is idle for half of it.
    """
    times: list[dict[int, float]] = [defaultdict(float) for _ in range(CELLS)]
    for slot, start, end in spans:
        for cell in range(int(start / length), min(ceil(end / length), CELLS)):
            times[cell][slot] += min(end, (cell + 1) * length) - max(start, cell * length)
    slots = [max(part, key=lambda slot: part[slot]) if sum(part.values()) > length / 2 else None for part in times]
    cell = 0
    for slot, cells in groupby(slots):
        first, cell = cell, cell + sum(1 for _ in cells)
        if slot is not None:
            yield SlotSpan(slot, first * length, cell * length)
