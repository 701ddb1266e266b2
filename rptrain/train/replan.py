"""Plan again with measured times, and compare the steps of the new plan with those of the first one."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rptrain.engine.meter import Measured
from rptrain.planner.choose import RunPlan
from rptrain.planner.memory import plan_run
from rptrain.planner.short_steps import with_sequences
from rptrain.planner.timings import Timings, load
from rptrain.schedule.estimate import estimate
from rptrain.train.job import Job
from rptrain.utils.units import format_bytes, format_percent, format_seconds

log = logging.getLogger(__name__)

COMPARED = 6  # steps with each of the two plans; the first one has no duration
MIN_GAIN = 0.01  # a new plan must shorten a step by more than this fraction


def replan(job: Job, measured: Measured) -> RunPlan:
    """The plan with measured times, if its steps are shorter by more than MIN_GAIN; otherwise the job's own stages.

    If the new plan does not fit in host memory, the job's own stages are kept, with a warning.
    """
    plan, memory = plan_run(job.sized, job.spec, job.hardware, measured)
    present = estimate(plan.costs, job.plan.plan.stages, plan.setting)
    own = replace(job.plan, estimate=present, costs=plan.costs, setting=plan.setting)
    own, plan = (with_sequences(run, job.sized, job.batches.per_epoch) for run in (own, plan))
    if plan.estimate.period > own.estimate.period * (1 - MIN_GAIN):
        return own
    if memory.host.missing:
        log.warning(
            "the plan with measured times needs %s of host memory, but %s: keeping the present plan",
            format_bytes(memory.host.total),
            memory.host.allowed,
        )
        return own
    return plan


def with_recorded_times(job: Job, folder: Path) -> tuple[Job, bool]:
    """The job, planned with the times that a run has recorded; and whether to measure them first."""
    if not job.config.engine.replan:
        return job, False
    measured = load(folder, job.conditions)
    if measured is None:
        return job, True
    return replace(job, plan=replan(job, measured)), False


def is_worthwhile(job: Job, steps: int) -> bool:
    """Whether a run of this many steps is at least twice as long as measuring and comparing plans takes."""
    return steps >= 2 * (2 * (job.warm_up + COMPARED) + job.measuring)


@dataclass(frozen=True)
class Candidate:
    """A job with the plan that was made with measured times. Without a gain, it is the plan that was measured."""

    job: Job
    timings: Timings

    @classmethod
    def of(cls, job: Job, measured: Measured | None) -> Self | None:
        """None without times, or if they are impossible, with a warning."""
        if measured is None:
            return None
        timings = Timings(job.conditions, measured)
        if problem := timings.problem:
            log.warning("the layers were measured, but their times are not used: %s", problem)
            return None
        return cls(replace(job, plan=replan(job, measured)), timings)


@dataclass(frozen=True)
class Comparison:
    """The seconds of a step with the first plan and with the new one. None if no step could be timed."""

    first: float | None
    new: float | None

    @property
    def gain(self) -> float | None:
        """How much faster steps are with the new plan, as a fraction."""
        return None if self.first is None or self.new is None else self.first / self.new - 1

    @property
    def slower(self) -> bool:
        """Whether steps are slower with the new plan. Without a comparison the plan is trusted."""
        return self.gain is not None and self.gain < 0

    def sentence(self) -> str:
        if self.first is None or self.new is None:
            return "the new plan is used without a comparison: saves, validations or pauses interrupted every step"
        times = f"{format_seconds(self.new)} per step, {format_seconds(self.first)} with the first plan"
        if self.slower:
            return f"the new plan is slower ({times}): using the first plan again"
        return f"the new plan is {format_percent(self.gain)} faster ({times})"
