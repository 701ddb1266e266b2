"""Comparison of a plan with other pipeline schedules, by simulation."""

from dataclasses import asdict, dataclass
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

    Looped BFS is left out if it is best with one stage per device, where it is GPipe.

    The other schedules update synchronously and keep the weights and gradients of their stages on the devices. All use
    the same times of layers. Copies between their devices and their optimizer take no time, which favors them, and
    their peak includes neither optimizer state nor workspace.
    """
    plan, estimate = run.plan, run.estimate
    ours = ScheduleTime(OURS, len(plan.stages) / plan.devices, estimate.period, estimate.bubble, run.device.total)
    boundary = run.setting.links.boundary if run.setting.links else 0
    found = baselines.best(run.costs, plan.devices, plan.micro_batches, boundary)
    if "Looped BFS" in found and found["Looped BFS"].loops == 1:
        del found["Looped BFS"]
    others = [ScheduleTime(name, one.loops, one.seconds, one.bubble, one.peak) for name, one in found.items()]
    return sorted([ours, *others], key=lambda time: time.seconds)
