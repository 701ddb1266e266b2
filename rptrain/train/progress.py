"""The display of a run: what it trains, in a line each; then a bar on a terminal, lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Self

from rich.console import Console

from rptrain.engine.distributed.peers import Peers
from rptrain.models.layers.block import blocks
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.names import expert_parameter, params_of
from rptrain.planner.short_steps import tokens_of
from rptrain.planner.text import describe_stages, model_sentence
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.events import BestLoaded, Event, LossesRepeated, Resumed, Step
from rptrain.runs.records.lanes import Phase
from rptrain.runs.records.loss_change import finished_sentence
from rptrain.runs.view.pace import REPORTS, SHORTEST
from rptrain.runs.view.run_view import RunView
from rptrain.train.job import Job
from rptrain.utils.console import console as standard_console
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.phases import Phase as LongPhase
from rptrain.utils.text import counted, one_line
from rptrain.utils.units import format_count, format_duration, format_loss, format_rate, format_seconds, format_short

NOTED = (BestLoaded, Resumed, LossesRepeated)  # printed, too, though they are no warnings


class ProgressDisplay(PhaseDisplay):
    """Shows the progress of training and its long phases: a bar on a terminal, lines elsewhere, nothing if `quiet`.
    `copy` is called with all lines, whatever is shown.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        quiet: bool = False,
        console: Console | None = None,
        copy: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(
            shown=not quiet, console=console or standard_console(), transient=False, environment={}, copy=copy
        )
        self._total = total_steps
        self._recent: deque[Step] = deque(maxlen=REPORTS)  # reported steps, over which the pace is measured
        self._done = 0
        self._phase: Phase = "training"
        self._step: LongPhase | None = None  # the step that runs, if it takes long

    def update(self, step: Step) -> None:
        """Show the step's loss and pace."""
        self._recent.append(step)
        line = describe(self._recent, self._total, details=True)
        if self._has_bar:
            self._copy(line)
        else:
            self.note(line)
        self.advance(step.step)

    def advance(self, done: int) -> None:
        """This many steps are done. Only the bar shows them all."""
        self._done = done
        self._refresh()

    @contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        """Show this phase as long as the context lasts, unless it is training. A pause does not count in the pace."""
        before, self._phase = self._phase, phase
        self._refresh()
        try:
            yield
        finally:
            self._phase = before
            if phase == "paused" and self._recent:
                last = self._recent.pop()
                self._recent.clear()
                self._recent.append(replace(last, step=self._done, time=time.time()))
            self._refresh()

    def __enter__(self) -> Self:
        self._refresh()
        self._show()
        return super().__enter__()

    def _draw_phase(self, now: LongPhase | None) -> None:
        self._step = now if now is not None and now.repeats else None
        if now is None or now.repeats:
            self._refresh()
        else:
            super()._draw_phase(now)

    def _refresh(self) -> None:
        if not self._has_bar:
            return
        text = f"step {self._done}/{self._total}"
        if recent := tuple(self._recent):  # in the thread that polls phases, too
            text = describe(recent, self._total, self._done, self._step)
        if self._phase != "training":
            text = f"{text}  {self._phase}"
        self._draw(text, self._done, self._total)


@dataclass(frozen=True)
class Journal:
    """The records of a run, the important ones of which are printed, too. Threads share it."""

    log: EventLog
    progress: ProgressDisplay

    def emit(self, event: Event) -> None:
        """Writes a record. Prints its sentence if it is a warning or an error, or one of NOTED."""
        self.log.write(event)
        if (sentence := event.sentence()) and (event.severity != "info" or isinstance(event, NOTED)):
            self.progress.note(sentence)

    def check(self) -> None:
        """Raises RunDeleted if the run's folder was deleted."""
        self.log.check()


def closing_lines(run: Path) -> Iterator[str]:
    """What to print at the end of a run that finished: how the loss changed, and what to try if it hardly fell."""
    view = RunView(run)
    if (change := view.loss_change) is not None:
        yield finished_sentence(view.step, change)
        if (hint := change.hint(view.step)) is not None:
            yield hint


def describe(
    recent: Sequence[Step],
    total_steps: int,
    done: int | None = None,
    running: LongPhase | None = None,
    *,
    details: bool = False,
) -> str:
    """A line about the last of these steps, with the remaining time at their pace. `done`: the steps that are done, if
    they are more. `running`: the step that runs, whose progress then takes the place of the speed. `details`: with the
    learning rate, the gradient norm, the epoch, and how many steps were skipped since the line before.
    """
    first, step = recent[0], recent[-1]
    done = step.step if done is None else done
    parts = [f"step {done}/{total_steps}"]
    if step.skipped:
        parts.append("skipped: the gradients were not finite")
    elif step.loss is not None:
        parts.append(f"loss {format_loss(step.loss)}")
    if details:
        parts += _details(step)
    if running is not None:
        left = "" if running.left is None else f", {format_duration(running.left)} left"
        parts.append(f"{running.done:,}/{counted(running.total or 0, running.unit)}{left}")
    elif not step.warm_up:
        parts.append(format_rate(step.tokens_per_second))
    elif step.step < total_steps:
        parts.append("compiling" if step.compiled else "warming up")
    else:
        parts.append(f"{format_rate(step.tokens_per_second)} with the warm-up")
    if step.time - first.time >= SHORTEST:
        rest = (step.time - first.time) / (step.step - first.step) * (total_steps - done)
        parts.append(f"ETA {format_duration(rest)}")
    return "  ".join(parts)


def _details(step: Step) -> Iterator[str]:
    yield f"lr {format_short(step.learning_rate)}"
    if step.grad_norm is not None and isfinite(step.grad_norm):
        yield f"grad norm {format_short(step.grad_norm)}"
    if step.epoch is not None:
        yield f"epoch {step.epoch:.2f}"
    if (others := step.skips - step.skipped) > 0:
        yield f"{counted(others, 'step')} skipped"


def heading(run: RunDir, checkpoint: Path | None, job: Job, peers: Peers | None = None) -> Iterator[str]:
    """The lines that are shown before the steps. `checkpoint`: the one that the run resumes. `peers`: of several
    processes.
    """
    begin = "a new run" if checkpoint is None else f"resumed from {checkpoint.name}"
    yield one_line(f"run    {run.path}, {begin}")
    yield one_line(f"model  {model_sentence(job.config, job.spec)}")
    yield one_line(f"train  {_trained(job)}")
    yield one_line(f"data   {_data(job)}")
    yield one_line(f"plan   {_plan(job)}")
    if peers is not None:
        yield one_line(f"peers  {peers.world} processes; {peers.name(peers.rank)} listens at {peers.place}")


def _trained(job: Job) -> str:
    lora, spec = job.config.adapters, job.spec
    what = "some weights frozen" if spec.frozen else "all weights"
    if lora is not None:
        what = f"adapters of rank {lora.r}{_of_experts(spec)}"
    trained, total = spec.num_trainable, spec.num_parameters
    share = f"{100 * trained / total:.3g}%"
    return f"{what}; trainable: {format_count(trained)} of {format_count(total)} parameters ({share})"


def _of_experts(spec: ModelSpec) -> str:
    """What the experts of a model with adapters get; empty for a model without experts."""
    pairs = [(params_of(spec, block), product) for block in blocks(spec) for product in block.expert_products]
    if not pairs:
        return ""
    adapted = {
        expert_parameter(params[product.name]).rpartition(".")[2]: None
        for params, product in pairs
        if product.adapters is not None
    }
    if adapted:
        return f", in experts on {' and '.join(adapted)}"
    return ", none in experts (lora.target_parameters adds them)"


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
    return f"{describe_stages(plan.stages)} on {devices}; estimated: {speed}"
