"""What a run trains: its folder, model, data, plan and processes, in a line each."""

from collections.abc import Iterator
from pathlib import Path

from rptrain.engine.distributed.peers import Peers
from rptrain.planner.short_steps import tokens_of
from rptrain.planner.text import describe, model_sentence
from rptrain.runs.folder.run_dir import RunDir
from rptrain.train.job import Job
from rptrain.utils.text import counted, one_line
from rptrain.utils.units import format_rate, format_seconds


def heading(run: RunDir, checkpoint: Path | None, job: Job, peers: Peers | None = None) -> Iterator[str]:
    """The lines that are shown before the steps. `checkpoint`: the one that the run resumes. `peers`: of several
    processes.
    """
    begin = "a new run" if checkpoint is None else f"resumed from {checkpoint.name}"
    yield one_line(f"run    {run.path}, {begin}")
    yield one_line(f"model  {model_sentence(job.config, job.spec)}, {_trained(job)}")
    yield one_line(f"data   {_data(job)}")
    yield one_line(f"plan   {_plan(job)}")
    if peers is not None:
        yield one_line(f"peers  {peers.world} processes; {peers.name(peers.rank)} listens at {peers.place}")


def _trained(job: Job) -> str:
    lora = job.config.adapters
    if lora is not None:
        return f"adapters of rank {lora.r}"
    return "some weights frozen" if job.spec.frozen else "all weights trained"


def _data(job: Job) -> str:
    first, *others = job.config.data.train
    more = f" and {counted(len(others), 'more set')}" if others else ""
    sequences = f"{counted(len(job.sequences), 'sequence')} of {job.sequences.length:,} tokens"
    held_out = "" if job.validation is None else f", {len(job.validation.sequences):,} for validation"
    epochs = job.total_steps / job.batches.steps_per_epoch
    times = f"{epochs:.1f} epochs" if epochs >= 0.95 else f"{epochs:.2g} of an epoch"
    return f"{first.path}{more}: {sequences}{held_out}; {counted(job.total_steps, 'step')}, {times}"


def _plan(job: Job) -> str:
    plan, estimate, machine = job.plan.plan, job.plan.estimate, job.hardware.machine
    devices = (
        f"{machine.devices} × {machine.card.name}" if job.hardware.gpus else counted(machine.devices, "CPU worker")
    )
    tokens = tokens_of(job.config, job.batches.per_epoch)
    speed = f"{format_seconds(estimate.period)} per step, {format_rate(tokens / estimate.period)}"
    return f"{describe(plan.stages)} on {devices}; estimated: {speed}"
