"""Comparison of a plan with other pipeline schedules, by simulation."""

from dataclasses import asdict, dataclass
from math import isclose
from typing import Any

from rptrain.planner.choose import RunPlan
from rptrain.schedule import baselines

OURS = "RoundPipe"


@dataclass(frozen=True)
class ScheduleTime:
    """A simulated step of one schedule."""

    schedule: str
    stages_per_device: float
    seconds: float  # per step
    bubble: float
    peak: int  # bytes on the device that needs most

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(run: RunPlan) -> list[ScheduleTime]:
    """The plan, and the best step of each other schedule that is possible, the fastest first.

    A schedule is left out if its step equals that of another one, as looped BFS with one stage per device equals GPipe.

    The other schedules update synchronously, recompute every layer except the head, and keep the weights and gradients
    of their stages on the devices. All use the same layer times. Copies between their devices and their optimizer take
    no time, which favors them, and their peak includes neither optimizer state nor workspace.
    """
    plan, estimate = run.plan, run.estimate
    ours = ScheduleTime(OURS, len(plan.stages) / plan.devices, estimate.period, estimate.bubble, run.device.total)
    boundary = run.setting.links.boundary if run.setting.links else 0
    found = baselines.best(run.costs, plan.devices, plan.micro_batches, boundary)
    others = list[ScheduleTime]()
    for name, one in found.items():
        if not any(isclose(one.seconds, other.seconds) and one.peak == other.peak for other in others):
            others.append(ScheduleTime(name, one.loops, one.seconds, one.bubble, one.peak))
    return sorted([ours, *others], key=lambda time: time.seconds)
