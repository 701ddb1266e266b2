"""The simulated step of a plan, as the records of a run keep it."""

from dataclasses import replace

from rptrain.planner.choose import RunPlan
from rptrain.runs.records.timeline import Schedule, window
from rptrain.schedule.dispatch import dispatch
from rptrain.schedule.plan import Computation
from rptrain.schedule.simulate import COMPUTATION, simulate

CHUNK = 256 << 20  # bytes of a copy: smaller ones take longer to simulate
SHOWN = 6  # the iteration that is shown: the first ones fill the pipeline
SHOWN_OF_MANY = 4  # the same in a step with more than MANY; pairs of steps are found from the fourth one on
SLOT = 4  # computations that take as long to simulate as the copies of a slot
MANY, MOST = 2500, 7500  # computations and copies in a step: with more than MOST, a simulation takes over a second


def simulated_step(run: RunPlan) -> Schedule | None:
    """A step of the plan in the steady state; None if simulating its micro-batches and slots would take long."""
    count = run.plan.micro_batches * len(run.plan.stages) + SLOT * sum(1 for _ in run.plan.slots(0))
    if count > MOST:
        return None
    shown = SHOWN if count <= MANY else SHOWN_OF_MANY
    plan, setting = run.plan, run.setting
    links = setting.links and replace(setting.links, chunk=CHUNK)
    timeline = simulate(dispatch(plan, run.costs, links=links, lag=setting.lag, iterations=shown + 2))
    slots = {
        (iteration, slot.round, slot.stage.kind, slot.stage.layers): slot.index
        for iteration in range(shown + 2)
        for slot in plan.slots(iteration)
    }
    devices: list[list[Computation]] = [[] for _ in range(plan.devices)]
    for task, start, end in zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True):
        if task.kind in COMPUTATION:
            slot = slots[task.iteration, task.round, task.kind, task.layers]
            devices[task.device].append(Computation(task.iteration, slot, start, end))
    if (step := window(devices, shown)) is None:
        return None
    alone = plan.devices < plan.replicas  # each device computes whole rounds
    shift = plan.rounds if alone else plan.turns * len(plan.stages)
    return Schedule(tuple(map(str, plan.stages)), plan.devices if alone else plan.width, shift, step)
