"""Everything about a run that can be known, and found wrong, before memory is taken and weights are read."""

import logging
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from rptrain.checkpoint import adapter
from rptrain.checkpoint.adapter import Adapter, AdapterFiles, base_name
from rptrain.config.resolve import Resolved
from rptrain.config.schema import Config
from rptrain.data.datasets import batches_of, find_tokenizer, training_set, validation_set
from rptrain.data.loader import Batches
from rptrain.data.sequences import Sequences
from rptrain.data.template import load_template
from rptrain.engine.meter import Measured
from rptrain.models.spec import ModelSpec
from rptrain.models.weights import pretrained
from rptrain.planner import auto
from rptrain.planner.advice import advise
from rptrain.planner.choose import DTYPES, RunPlan
from rptrain.planner.hardware import Hardware, here, readable
from rptrain.planner.memory import MemoryPlan, plan_run
from rptrain.planner.model import find_files, lora_settings, training_model
from rptrain.runs.run_dir import RunDir
from rptrain.schedule.estimate import estimate
from rptrain.utils.errors import UserError

log = logging.getLogger(__name__)

WORTH = 0.01  # of a step's time: a plan that gains less is not worth the change


@dataclass(frozen=True)
class Job:
    """A checked run: the model's shape and files, the tokenized data, the plan and its memory."""

    config: Config
    model_dir: Path
    spec: ModelSpec
    files: pretrained.WeightFiles | None  # None: random weights, or those of a checkpoint
    begin: AdapterFiles | None  # the adapter that is gone on from
    tokenizer: Any  # None where the data needs none
    sequences: Sequences
    batches: Batches
    validation: Batches | None  # whose loss is measured
    hardware: Hardware  # the devices that are used
    plan: RunPlan
    memory: MemoryPlan
    total_steps: int

    @property
    def devices(self) -> tuple[str, ...]:
        return self.hardware.names

    @property
    def device_limit(self) -> int | None:
        """Bytes for tensors on each GPU."""
        return self.hardware.room

    @property
    def chat_template(self) -> str | None:
        """The template's text where the config sets one: it goes with checkpoints and the export."""
        given = self.config.data.chat_template
        return None if given is None else load_template(self.tokenizer, given)

    @property
    def adapter(self) -> Adapter | None:
        """What is written with adapters, where they are trained."""
        lora = self.config.adapters
        if lora is None:
            return None
        return Adapter(lora_settings(lora), base_name(self.config.model.path, self.model_dir))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.model.dtype]

    @property
    def asynchronous(self) -> bool:
        return self.config.optim.update == "async"


def prepare_job(config: Config, hardware: Hardware | None = None, *, weights_needed: bool = True) -> Job:
    """Looks at everything the run needs, cheapest first. UserError for what a person can mend.

    `hardware` is by default what is here now. A resumed run has its weights in a checkpoint: the model directory's are
    not looked at, but where some are frozen.
    """
    model_dir, spec = training_model(config)
    hardware = hardware or here(config.engine)
    files = find_files(config, model_dir, spec) if weights_needed or spec.frozen else None
    begin = _adapter_to_begin_with(config, spec) if weights_needed and files is not None else None
    _warn_of_idle(config, hardware.devices)
    tokenizer = find_tokenizer(config, model_dir)
    if config.eval.questions:
        load_template(tokenizer, None)  # a UserError where there is none
    plan, memory = _plan(config, spec, hardware)
    rows, held_out = training_set(config, model_dir, spec.vocab_size, tokenizer)
    if config.data.val:
        held_out = validation_set(config, model_dir, spec.vocab_size, tokenizer)
    batches = batches_of(rows, config)
    measured = None if held_out is None else batches_of(held_out, config)
    train = config.train
    total = train.max_steps or max(1, ceil(train.num_epochs * batches.steps_per_epoch))
    used = hardware.first(config.round_size)
    return Job(config, model_dir, spec, files, begin, tokenizer, rows, batches, measured, used, plan, memory, total)


def replan(job: Job, measured: Measured) -> RunPlan:
    """The plan with measured times, where its steps are shorter by more than WORTH; otherwise the job's own stages.

    A plan that the host's memory has no room for is not taken either, with a warning.
    """
    plan, memory = plan_run(job.config, job.spec, job.hardware, measured)
    present = estimate(plan.costs, job.plan.plan.stages, plan.setting)
    own = replace(job.plan, estimate=present, costs=plan.costs, setting=plan.setting)
    if plan.estimate.period > present.period * (1 - WORTH):
        return own
    if memory.host.missing:
        log.warning(
            "a plan with measured times would need %s of host memory, but %s: it is not taken",
            readable(memory.host.total),
            memory.host.allowed,
        )
        return own
    return plan


def resolve_auto(resolved: Resolved, found: tuple[RunDir, Path] | None, hardware: Hardware) -> Resolved:
    """The config with numbers in place of "auto": those of the run that goes on, or the quickest by the planner."""
    config = resolved.config
    if not auto.is_automatic(config):
        return resolved
    if found is not None:
        run = found[0]
        return auto.with_values(resolved, auto.recorded(config, run.config()), str(run.config_path))
    spec = training_model(config)[1]
    return auto.with_values(resolved, auto.resolve_auto(config, spec, hardware), "planned")


def _adapter_to_begin_with(config: Config, spec: ModelSpec) -> AdapterFiles | None:
    """That of lora.adapter, compared with the settings and the model."""
    lora = config.adapters
    if lora is None or lora.adapter is None:
        return None
    files = adapter.read(lora.adapter)
    adapter.check_settings(files, lora_settings(lora), config.model.path)
    adapter.check(files, spec)
    return files


def _plan(config: Config, spec: ModelSpec, hardware: Hardware) -> tuple[RunPlan, MemoryPlan]:
    """UserError where it does not fit, with what to change."""
    try:
        plan, memory = plan_run(config, spec, hardware)
        memory.check()
    except UserError as error:
        advice = advise(config, spec, hardware)
        raise UserError("\n".join(filter(None, (str(error), str(advice))))) from None
    return plan, memory


def _warn_of_idle(config: Config, devices: int) -> None:
    size = config.round_size
    if size < devices and config.engine.devices != "auto":
        log.warning("%d micro-batches a round keep %d of %d devices busy: only %d are used", size, size, devices, size)
