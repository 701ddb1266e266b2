"""Everything about a run that can be known, and found wrong, before memory is taken and weights are read."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from rptrain import automatic
from rptrain import devices as device_choice
from rptrain.config import Config
from rptrain.config_source import Resolved
from rptrain.data.loader import Batches, load_tokenizer, prepare
from rptrain.data.rows import Rows
from rptrain.data.template import load_template
from rptrain.engine.memory import available_bytes
from rptrain.engine.meter import Measured
from rptrain.errors import UserError
from rptrain.models import registry, weights
from rptrain.models.spec import ModelSpec
from rptrain.plan.estimate import estimate
from rptrain.planner import RunPlan, Workload, make_plan
from rptrain.rundir import RunDir

log = logging.getLogger(__name__)

WORTH = 0.01  # of a step's time: a plan that gains less is not worth the change
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Job:
    """A checked run: the model's shape and files, the tokenised data, the plan and its memory."""

    config: Config
    model_dir: Path
    spec: ModelSpec
    files: weights.WeightFiles | None  # None: random weights, or those of a checkpoint
    tokenizer: Any  # None where the data needs none
    rows: Rows
    batches: Batches
    devices: tuple[str, ...]
    device_limit: int | None  # bytes for tensors on each GPU
    plan: RunPlan
    total_steps: int

    @property
    def chat_template(self) -> str | None:
        """The template's text where the config sets one: it goes with checkpoints and the export."""
        given = self.config.data.chat_template
        return None if given is None else load_template(self.tokenizer, given)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.model.dtype]

    @property
    def asynchronous(self) -> bool:
        return self.config.optim.update == "async"


def prepare_job(config: Config, *, weights_needed: bool = True) -> Job:
    """Looks at everything the run needs, cheapest first. UserError for what a person can mend.

    A resumed run has its weights in a checkpoint: the model directory's are not looked at.
    """
    model_dir = registry.locate(config.model.path)
    spec = registry.build(registry.read_config(model_dir))
    files = None
    stored = any(model_dir.glob("*.safetensors")) or not _is_preset(model_dir)
    if weights_needed and config.model.init == "auto" and stored:
        files = weights.check(model_dir, spec)
    devices = _devices(config)
    tokens_needed = any(source.path != "builtin:random" for source in config.data.train) or config.eval.questions
    tokenizer = load_tokenizer(model_dir) if tokens_needed else None
    if tokenizer is not None and config.data.chat_template is not None:
        tokenizer.chat_template = load_template(tokenizer, config.data.chat_template)
    if config.eval.questions:
        load_template(tokenizer, None)  # a UserError where there is none
    limit = device_choice.allocator_limit(devices, config.engine.vram_limit)
    with _advice(config, spec):
        plan = _plan(config, spec, devices, limit, config.engine.host_limit or available_bytes())
        device_choice.check_host(_host_bytes(plan, devices), config.engine.host_limit)
    data, train = config.data, config.train
    rows = prepare(
        sources=data.train,
        tokenizer=tokenizer,
        max_length=data.max_length,
        packing=data.packing,
        assistant_only_loss=data.assistant_only_loss,
        chat_template=data.chat_template,
        vocab_size=spec.vocab_size,
        seed=train.seed,
    )
    if (token := int(rows.input_ids.max())) >= spec.vocab_size:
        raise UserError(
            f"the tokenizer in {model_dir} gives token {token}, but config.json says vocab_size {spec.vocab_size}: "
            "they are of different models"
        )
    batches = Batches(rows, train.rows, train.global_batch_size, train.seed)
    total = train.max_steps or max(1, ceil(train.num_epochs * batches.steps_per_epoch))
    return Job(config, model_dir, spec, files, tokenizer, rows, batches, devices, limit, plan, total)


@contextmanager
def _advice(config: Config, spec: ModelSpec) -> Iterator[None]:
    """Adds what to change to the UserError of a run that does not fit."""
    try:
        yield
    except UserError as error:
        from rptrain.advice import advise  # which plans as this module does

        advice = advise(config, spec, device_choice.here(config.engine))
        raise UserError("\n".join(filter(None, (str(error), str(advice))))) from None


def replan(job: Job, measured: Measured, *, running: bool = False) -> RunPlan:
    """The plan with measured times, where its steps are shorter by more than WORTH; otherwise the job's own.

    A plan that the host's memory has no room for is not taken either, with a warning.
    `running`: the job's plan has its memory already, and gives it back to the other.
    """
    held = _host_bytes(job.plan, job.devices) if running else 0
    room = job.config.engine.host_limit or available_bytes() + held
    plan = _plan(job.config, job.spec, job.devices, job.device_limit, room, measured)
    present = estimate(plan.costs, job.plan.plan.stages, plan.setting)
    if plan.estimate.period > present.period * (1 - WORTH):
        return job.plan
    needed = _host_bytes(plan, job.devices)
    if needed > room:
        texts = device_choice.readable(needed), device_choice.readable(room)
        log.warning(
            "a plan with measured times would need %s of host memory, and there are %s: it is not taken", *texts
        )
        return job.plan
    return plan


def settle(resolved: Resolved, found: tuple[RunDir, Path] | None) -> Resolved:
    """The config with numbers in place of "auto": those of the run that goes on, or the quickest by the planner."""
    config = resolved.config
    if not automatic.is_automatic(config):
        return resolved
    if found is not None:
        run = found[0]
        return automatic.settled(resolved, automatic.recorded(config, run.config()), str(run.config_path))
    spec = registry.build(registry.read_config(registry.locate(config.model.path)))
    devices = device_choice.resolve(config.engine.devices)
    limit = device_choice.allocator_limit(devices, config.engine.vram_limit)
    host_limit = config.engine.host_limit or available_bytes()

    def plan(choice: Config) -> RunPlan:
        return _plan(choice, spec, devices[: choice.round_size], limit, host_limit)

    return automatic.settled(resolved, automatic.settle(config, len(devices), plan), "planned")


def _is_preset(model_dir: Path) -> bool:
    return model_dir.parent == registry.PRESETS


def _devices(config: Config) -> tuple[str, ...]:
    devices = device_choice.resolve(config.engine.devices)
    size = config.round_size
    if size < len(devices):
        if config.engine.devices != "auto":
            log.warning(
                "%d micro-batches a round keep %d of %d devices busy: only %d are used", size, size, len(devices), size
            )
        devices = devices[:size]
    return devices


def _plan(
    config: Config,
    spec: ModelSpec,
    devices: tuple[str, ...],
    device_limit: int | None,
    host_limit: int,
    measured: Measured | None = None,
) -> RunPlan:
    return make_plan(
        spec,
        device_choice.machine(devices),
        workload_of(config),
        device_limit=device_limit,
        host_limit=host_limit,
        measured=measured,
    )


def workload_of(config: Config) -> Workload:
    """What a plan is made for, by a config without "auto"."""
    train = config.train
    return Workload(
        rows=train.rows,
        length=config.data.max_length,
        micro_batches=train.micro_batches,
        round_size=config.round_size,
        dtype=DTYPES[config.model.dtype],
        asynchronous=config.optim.update == "async",
    )


def _host_bytes(plan: RunPlan, devices: tuple[str, ...]) -> int:
    workers = sum(name.startswith("cpu") for name in devices)  # their device memory is the host's
    return plan.host_bytes + workers * plan.device.total
