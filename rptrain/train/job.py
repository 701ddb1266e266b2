"""Check everything about a run before memory is allocated and weights are read."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rptrain.checkpoint.adapter import Adapter, AdapterFiles, base_name
from rptrain.config.resolve import Resolved
from rptrain.config.schema import Config
from rptrain.data import eos, padding
from rptrain.data.amount import amount_of
from rptrain.data.datasets import batches_of, find_tokenizer, training_set, validation_set
from rptrain.data.excerpt import PLANNING, excerpt
from rptrain.data.loader import RANDOM, Batches
from rptrain.data.sequences import Sequences
from rptrain.data.template import load_template
from rptrain.data.tokens import Stream
from rptrain.engine.memory.share import Share
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.meter import measured_stages
from rptrain.inference.evaluate import check_questions
from rptrain.inference.samples import encode_samples
from rptrain.kernels.toolchain import try_out
from rptrain.machine.hardware import Hardware, here
from rptrain.models.base_files import CONFIG, BaseFile, base_files, check_base_files, check_links, left_out
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms import balance
from rptrain.models.weights import pretrained
from rptrain.planner import auto, short_steps
from rptrain.planner.advice import advise
from rptrain.planner.choose import RunPlan
from rptrain.planner.length import total_steps
from rptrain.planner.memory import MemoryPlan, plan_run
from rptrain.planner.timings import Conditions
from rptrain.preflight.checks import adapter_of
from rptrain.preflight.model import find_files, for_hardware, lora_settings, trained_shape, training_model
from rptrain.runs.folder.run_dir import RunDir
from rptrain.utils.errors import UserError
from rptrain.utils.limited import end_idle
from rptrain.utils.phases import phase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A checked run: model shape and files, tokenized data, plan and memory."""

    config: Config
    sized: Config  # the same with the micro-batches that steps have: fewer if there are few data
    model_dir: Path
    base: Mapping[str, BaseFile]  # the model's other files, read at the start: later changes do not reach checkpoints
    spec: ModelSpec
    files: pretrained.WeightFiles | None  # None: random weights, or the checkpoint of a resumed run
    initial_adapter: AdapterFiles | None  # from lora.adapter
    tokenizer: Any  # None if the data needs no tokenizer
    sequences: Sequences
    batches: Batches
    validation: Batches | None
    hardware: Hardware  # only the devices that are used
    plan: RunPlan
    memory: MemoryPlan
    total_steps: int
    own_config: bool = False  # not that of the files: of a text model alone, or with tie_word_embeddings added
    ends: tuple[int, ...] = ()  # the ids that exports add to generation_config.json: see `eos.added`
    eos_ids: frozenset[int] = frozenset()  # all that end an answer of the trained model
    sample_inputs: Sequence[Sequence[int]] = ()  # the tokens of log.sample_prompts

    @property
    def devices(self) -> tuple[str, ...]:
        return self.hardware.names

    @property
    def share(self) -> Share | None:
        """The share of this process, if several train the model."""
        return self.layout.share

    @property
    def device_limit(self) -> int | None:
        """Memory limit for tensors per GPU, in bytes."""
        return self.hardware.tensor_bytes

    @property
    def chat_template(self) -> str | None:
        """The text of `data.chat_template`, if it is set. Checkpoints and the exported model include it."""
        given = self.config.data.chat_template
        return None if given is None else load_template(self.tokenizer, given)

    @property
    def adapter(self) -> Adapter | None:
        """The metadata to save with adapters; None unless adapters are trained."""
        lora = self.config.adapters
        if lora is None:
            return None
        return Adapter(lora_settings(lora), base_name(self.config.model.path, self.model_dir))

    @property
    def conditions(self) -> Conditions:
        """The conditions under which step times are measured."""
        return Conditions.of(self.config, self.spec, self.hardware)

    @property
    def warm_up(self) -> int:
        """The steps of a new engine until all stages are replayed as graphs."""
        return self.plan.plan.warm_up

    @property
    def measuring(self) -> int:
        """The steps that measure layers: two for each measured stage."""
        return 2 * len(measured_stages(self.spec, self.plan.plan.stages))

    @property
    def layout(self) -> StepLayout:
        return self.plan.layout

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def asynchronous(self) -> bool:
        return self.layout.asynchronous


def prepare_job(config: Config, hardware: Hardware | None = None, *, weights_needed: bool = True) -> Job:
    """Check everything that the run needs, the cheapest checks first. UserError for what a user can fix.

    `hardware` is detected by default. With `weights_needed=False`, for a resumed run, the model's weight files are
    checked only if some are frozen or carried along: the others are in the checkpoint.
    """
    model_dir, spec = training_model(config)
    hardware = hardware or here(config.engine)
    _try_out(hardware.names)
    spec = for_hardware(spec, config, hardware)
    with phase("checking the model's files", unit=""):
        files = find_files(config, model_dir, spec) if weights_needed or spec.frozen or spec.carried else None
    if files is not None:
        spec = replace(spec, narrow=pretrained.narrow(spec, files))
    initial_adapter = adapter_of(config, spec) if weights_needed and files is not None else None
    if weights_needed:
        padding.check(spec, model_dir)
    _warn_of_idle_devices(config, hardware)
    for warning in hardware.warnings:
        log.warning(warning)
    check_base_files(model_dir)
    if not config.model.follow_links:
        check_links(model_dir)
    base = base_files(model_dir, follow_links=config.model.follow_links)
    for path in left_out(model_dir):
        log.warning("%s leads out of the model's folder: it is not copied to checkpoints and exports", path)
    tokenizer = find_tokenizer(config, model_dir)
    own_eos, stops = eos.eos_ids(model_dir, spec.config, tokenizer), eos.stops(model_dir, spec.config)
    if config.eval.questions:
        check_questions(tokenizer)
    sample_inputs = encode_samples(tokenizer, config.log.sample_prompts, spec.vocab_size)
    try:
        planned = _plan(config, spec, hardware)
    except UserError:
        if not _is_small(config, tokenizer):
            raise
        planned = None
    sequences, held_out = training_set(config, model_dir, spec.vocab_size, tokenizer)
    if config.data.val:
        held_out = validation_set(config, model_dir, spec.vocab_size, tokenizer)
    end_idle()  # those that tokenized: the run does not need them
    batches = batches_of(sequences, config)
    validation = None if held_out is None else batches_of(held_out, config)
    total = total_steps(config, batches.steps_per_epoch)
    most = max(one.per_epoch for one in (batches, validation) if one is not None)
    sized = short_steps.fitted(config, most)
    plan, memory = planned if planned is not None and sized == config else _plan(sized, spec, hardware)
    plan = short_steps.with_sequences(plan, sized, batches.per_epoch)
    if few := short_steps.warning(config, batches.per_epoch):
        log.warning(few)
    used = hardware.used(sized)
    found = sorted(sequences.rows.ends)
    if unknown := [token for token in found if token not in own_eos]:
        log.warning(eos.sentence(unknown, tokenizer))
    if note := balance.note(spec):
        log.warning(note)
    row = padding.trained_without(spec) if weights_needed else None  # a resumed run keeps its own, which is recorded
    if warning := padding.warning(row, own_eos.union(found), _texts(config, sequences), tokenizer):
        log.warning(warning)
    ends = () if tokenizer is None else eos.added(found, stops, tokenizer)
    return Job(
        config,
        sized,
        model_dir,
        base,
        spec,
        files,
        initial_adapter,
        tokenizer,
        sequences,
        batches,
        validation,
        used,
        plan,
        memory,
        total,
        own_config=json.loads(base[CONFIG].content) != spec.config,
        ends=ends,
        eos_ids=own_eos.union(ends),
        sample_inputs=sample_inputs,
    )


@phase("planning", unit="")
def resolve_auto(resolved: Resolved, found: tuple[RunDir, Path] | None, hardware: Hardware) -> Resolved:
    """Replace "auto" in the config with the values of the resumed run, or the fastest ones according to the planner."""
    config = resolved.config
    if not auto.is_automatic(config):
        return resolved
    if found is not None:
        run = found[0]
        return auto.with_values(resolved, auto.recorded(config, run.config()), str(run.config_path))
    spec = for_hardware(training_model(config)[1], config, hardware)
    return auto.with_values(resolved, auto.resolve_auto(config, spec, hardware), "planned")


@phase("compiling a kernel", unit="")
def _try_out(devices: Sequence[str]) -> None:
    """UserError if kernels cannot be compiled or run on one of the GPUs."""
    for name in devices:
        if name.startswith("cuda"):
            try_out(torch.device(name))


@phase("planning", unit="")
def _plan(config: Config, spec: ModelSpec, hardware: Hardware) -> tuple[RunPlan, MemoryPlan]:
    """The plan and its memory. UserError, with advice, if it does not fit."""
    try:
        plan, memory = plan_run(config, spec, hardware)
        memory.check(resumed=hardware.saved > 0)
    except UserError as error:
        advice = advise(config, spec, hardware, shape_of=trained_shape)
        raise UserError("\n".join(filter(None, (str(error), str(advice))))) from None
    return plan, memory


def _is_small(config: Config, tokenizer: Any) -> bool:
    """Whether the data seem to have fewer sequences than a step takes: the run may fit though a whole step does not."""
    try:
        amount = amount_of(config, [excerpt(source, config.data, tokenizer, PLANNING) for source in config.data.train])
    except UserError:  # of the data, which are read once the plan fits
        return False
    return amount is not None and amount.sequences < config.train.global_batch_size


def _texts(config: Config, sequences: Sequences) -> tuple[Stream, ...]:
    """The tokens of the training sets, except those of random tokens."""
    return () if any(source.path == RANDOM for source in config.data.train) else sequences.streams


def _warn_of_idle_devices(config: Config, hardware: Hardware) -> None:
    groups, devices = hardware.groups(config), hardware.devices
    busy = config.round_size * groups
    if busy < devices and config.engine.devices != "auto":
        each = " in each replica" if groups > 1 else ""
        text = "%d micro-batches per round%s keep only %d of %d devices busy: using %d"
        log.warning(text, config.round_size, each, busy, devices, busy)
