"""The results of `rptrain plan`: a config's plan on this or another machine, its memory, limits and advice.

The JSON form is one object with these stable keys. Times are in seconds, sizes in bytes, rates in bytes per second.

    fits         whether the run can start: every memory with a known limit is large enough, and nothing refuses the run
    problem      why there is no plan, in words; null where there is one
    refusals     what else would refuse the run (key, message, place): missing data, no tokenizer, …; empty for another
                 machine. place is "file:line", "command line, KEY", or the config file if the key is not set
    warnings     what the run would do that is probably not meant, as sentences
    data_warnings those of them that are about rows of the data
    model        path, architecture, parameters, layers (the head is one), base (lora.base, or null)
    machine      here, card, tflops (the peak in bfloat16), link (a GPU's, each way), devices (in use), gpus (false:
                 workers on the CPU), asked (devices available), card_source ("this machine", "--card", "--timings": the
                 run was measured on it, or "assumed": no flag names it), rates (that products reach: bf16, fp16 and fp8
                 in 1e12 operations per second, null without FP8; source; null for workers on the CPU)
    step         micro_batch_size, length, micro_batches, round_size, replicas, tokens, update
    plan         text (rptrain/schedule/plan.py reads it), stages (kind, first, last), seconds_per_step,
                 tokens_per_second, bubble, source (of the times, such as "times measured in runs/my" or "profile of
                 RTX 4090"), past (run and tokens_per_second of an earlier run with the same settings, or null); null
                 without a plan
    length       steps, sequences, per_step (sequences of a step, of which the last one of an epoch can have fewer),
                 seconds, epochs, steps_per_epoch, samples and tokens (without padding) of the run,
                 exact (whether the data was counted, not estimated from its first rows), filled (fraction that is not
                 padding), longest (tokens of the longest sample that was read), shorter (a max_length that would be
                 better, or null), and measured_seconds and measured_in (the time at the speed of an earlier run with
                 the same settings, and its name, or null). Of another machine's data nothing is known; null if the
                 steps depend on it
    types        estimates for the type of products of the config and then for the other one (name, settings,
                 seconds_per_step, tokens_per_second), suggested (settings, or null); null without another type that can
                 be used, for a resumed run, which keeps its type, and with --timings, because the other type is not
                 measured
    roofline     ridge, blocks (name, layers, forward, backward: operations per byte), limit (null: computation hides
                 copies and updates; "up", "down", "optimizer", "network" or "together"), loss, stages; null without a
                 plan or GPUs
    reading      with model.hold = "map", mapped (bytes of file-backed weights), bytes_per_step, room (free
                 memory for files; null: unknown), rate (of the disk), seconds (to read a step's bytes), limits; null
                 without it, or a plan
    scaling      with --nodes, network (as given), rate (each way), plans for 1, 2, 4, … and all nodes (nodes,
                 seconds_per_step, tokens_per_second, efficiency, host_bytes and fits: those of a node, problem),
                 gradient_bytes and weight_bytes (that a node sends and receives in a step), exchange_seconds, limits
                 (whether the network does), loss (fraction by which it makes a step longer), hiding_rate (of the
                 slowest network that is hidden); null without it, or a plan. The other keys are of one of the nodes,
                 except `step`, and tokens_per_second of the plan, which are of all
    memory       places (kind, name, parts of name and nbytes, total, limit, source, fits, notes); without a plan the
                 least that any plan takes
    advice       remedies, those that cost least first (changes by key, saves by kind of memory, costs as texts,
                 tokens_per_second or null), missing (by kind of memory), machines on which it fits, as it is or after
                 changes (changes, costs, host and vram: memory to install in the host and in each GPU, or null, more:
                 by kind of memory, beyond what there is)
    comparison   with --compare, the plan and other schedules (rptrain/planner/compare.py), the fastest first: schedule,
                 stages_per_device, seconds, bubble, peak (bytes on a device; of other schedules without optimizer state
                 and workspace); null without it, or a plan
    data         see rptrain/data/preview.py; null without --show-data
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rptrain.config.resolve import Resolved
from rptrain.config.schema import Config
from rptrain.data.amount import Amount
from rptrain.data.datasets import batches_of, find_tokenizer, training_set
from rptrain.data.preview import Preview, preview
from rptrain.engine.meter import Measured
from rptrain.machine.flags import MachineFlags
from rptrain.machine.hardware import Hardware
from rptrain.models.layers.block import blocks
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.transforms import balance
from rptrain.models.weights.pretrained import WeightFiles
from rptrain.planner import auto, short_steps
from rptrain.planner.advice import Advice, advise
from rptrain.planner.choose import RunPlan
from rptrain.planner.disk import DiskReading, disk_reading
from rptrain.planner.learning_rate import low_rate
from rptrain.planner.length import RunLength, length_of, warnings_of
from rptrain.planner.measured_run import MeasuredRun
from rptrain.planner.memory import MemoryPlan, least_memory, long_text_warning, plan_run, with_saved
from rptrain.planner.network import Nodes
from rptrain.planner.past_speed import PastSpeed, past_speed
from rptrain.planner.product_types import ProductType, product_types, suggested
from rptrain.planner.scaling import Scaling, scaling
from rptrain.planner.timings import Conditions, load
from rptrain.preflight.checks import CheckResults, run_checks
from rptrain.preflight.machine_and_model import machine_and_model
from rptrain.preflight.model import find_files, for_hardware, trained_shape, training_model
from rptrain.runs.folder.outputs import Output
from rptrain.runs.folder.run_dir import RunDir, find
from rptrain.schedule import picture
from rptrain.schedule.coarse import Coarse, coarse
from rptrain.schedule.dispatch import dispatch
from rptrain.schedule.roofline import Sizes, Verdict, backward_intensity, forward_intensity, judge, ridge
from rptrain.schedule.simulate import Timeline, simulate
from rptrain.schedule.trace import chrome_trace
from rptrain.utils.dtypes import DTYPES
from rptrain.utils.errors import UserError
from rptrain.utils.phases import phase

PICTURE_CHUNK = 256 << 20  # bytes: pictures show no smaller pieces of a copy


@dataclass(frozen=True)
class BlockIntensity:
    """A kind of blocks, and its operations per uploaded byte in a round."""

    name: str  # the first block of its kind
    layers: int
    forward: float
    backward: float


@dataclass(frozen=True)
class PlanReport:
    """The plan of a config, and whether it fits. Without a plan, `run` is None and `problem` says why."""

    config: Config  # without "auto"
    sized: Config  # the same with the micro-batches that steps have: fewer if there are few data
    spec: ModelShape
    hardware: Hardware  # the devices that a round keeps busy
    asked: int  # all devices, including unused ones
    memory: MemoryPlan
    advice: Advice
    run: RunPlan | None
    problem: str | None
    measured: Path | None  # the folder of the run whose measured times are used; None: estimated times
    blocks: tuple[BlockIntensity, ...]
    verdict: Verdict | None
    reading: DiskReading | None
    types: tuple[ProductType, ...]
    scaling: Scaling | None
    checks: CheckResults
    length: RunLength | None
    past: PastSpeed | None  # of an earlier run with the same settings

    @property
    def warnings(self) -> list[str]:
        """What is probably not meant, as sentences."""
        of_length = () if self.length is None else warnings_of(self.config, self.length)
        of_rate = low_rate(self.config, self.spec.num_parameters)
        longest = self.checks.amount.longest if self.checks.amount else 0
        of_text = long_text_warning(longest, self.memory.host, self.hardware.program)
        others = filter(None, [of_text, of_rate, balance.note(self.spec)])
        return [*self.hardware.warnings, *self.checks.warnings, *of_length, *others]

    @property
    def fits(self) -> bool:
        """Whether the run can start."""
        return self.run is not None and self.memory.fits and not self.checks.refusals

    @property
    def source(self) -> str:
        """The source of the times."""
        card = self.hardware.machine.card
        return f"times measured in {self.measured}" if self.measured else f"profile of {card.name}"

    @property
    def tokens_per_second(self) -> float:
        """Tokens that a step computes, by the planned time of a step. There must be a plan."""
        assert self.run is not None
        amount = self.checks.amount
        return short_steps.tokens_of(self.config, amount and amount.sequences) / self.run.estimate.period

    @property
    def ridge(self) -> float:
        machine = self.hardware.machine
        return ridge(machine.card.peak.bf16, machine.link)

    def data(self, samples: int) -> Preview:
        """Reads the data. Raises UserError for mistakes in it."""
        model_dir, spec = training_model(self.config)
        tokenizer = find_tokenizer(self.config, model_dir)
        rows, _ = training_set(self.config, model_dir, spec.vocab_size, tokenizer)
        return preview(batches_of(rows, self.config), tokenizer, samples)

    def timeline(self, shown: Coarse) -> Timeline:
        """A simulated step, as much of it as is `shown`; in async with the previous step, which it overlaps."""
        assert self.run is not None
        setting = self.run.setting
        links = setting.links and replace(setting.links, chunk=PICTURE_CHUNK)
        return simulate(
            dispatch(
                shown.plan,
                shown.costs,
                links=links,
                lag=setting.lag,
                iterations=1 + setting.lag,
                weights=shown.weights,
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that the module's docstring describes."""
        config, spec, machine = self.config, self.spec, self.hardware.machine
        roofline = plan = None
        if self.run is not None:
            plan = {
                "text": str(self.run.plan),
                "stages": [{"kind": s.kind, "first": s.start, "last": s.stop - 1} for s in self.run.plan.stages],
                "seconds_per_step": self.run.estimate.period,
                "tokens_per_second": self.tokens_per_second,
                "bubble": self.run.estimate.bubble,
                "source": self.source,
                "past": self.past and self.past.to_dict(),
            }
        if self.verdict is not None:
            roofline = {
                "ridge": self.ridge,
                "blocks": [asdict(block) for block in self.blocks],
                "limit": self.verdict.limit,
                "loss": self.verdict.loss,
                "stages": [str(stage) for stage in self.verdict.stages],
            }
        return {
            "fits": self.fits,
            "problem": self.problem,
            "refusals": [asdict(refusal) for refusal in self.checks.refusals],
            "warnings": self.warnings,
            "data_warnings": list(self.checks.warnings),
            "model": {
                "path": config.model.path,
                "architecture": spec.architecture,
                "parameters": spec.num_parameters,
                "layers": len(spec.stack),
                "base": config.adapters and config.adapters.base,
            },
            "machine": {
                "here": self.hardware.here,
                "card": machine.card.name,
                "tflops": machine.card.peak.bf16,
                "link": machine.link,
                "devices": machine.devices,
                "gpus": bool(self.hardware.gpus),
                "asked": self.asked,
                "card_source": self.hardware.card_source,
                "rates": self._rates(),
            },
            "step": self.sized.step_sizes(),
            "plan": plan,
            "length": self.length and self.length.to_dict(),
            "types": self._types(),
            "roofline": roofline,
            "reading": self.reading and self.reading.to_dict(),
            "scaling": self.scaling and self.scaling.to_dict(),
            "memory": [place.to_dict() for place in self.memory.places],
            "advice": self.advice.to_dict(),
        }

    def _rates(self) -> dict[str, Any] | None:
        card = self.hardware.machine.card
        return {**asdict(card.rates), "source": card.rates_source} if self.hardware.gpus else None

    def _types(self) -> dict[str, Any] | None:
        better = suggested(self.types)
        estimates = [one.to_dict() for one in self.types]
        return {"estimates": estimates, "suggested": better and better.to_dict()["settings"]} if estimates else None


@phase("planning", unit="")
def report(
    resolved: Resolved, flags: MachineFlags, timings: Path | None = None, nodes: Nodes | None = None
) -> PlanReport:
    """Reads the model's config.json and plans, with the measured times of the run in the folder `timings` if given.

    With several `nodes`, the plan is that of one of them: of those with the most groups of replicas.

    Raises UserError for mistakes in the flags, and if the times do not apply; and for a model or devices that cannot be
    used, on this machine as a ConfigError with all other mistakes.
    """
    subject = _Subject.of(resolved, flags, timings, nodes)
    spec, hardware, resumed, source = subject.spec, subject.hardware, subject.resumed, subject.source
    alone_here, checks = hardware.here and nodes is None, CheckResults((), (), None)
    given, planned = auto.plan_auto(subject.config, spec, hardware, subject.times)
    if alone_here:
        checks = run_checks(resolved, given, subject.model_dir, spec)
    amount = checks.amount
    config = short_steps.fitted(given, amount and amount.sequences)
    used = hardware.used(config)
    run, memory, problem, measured = subject.plan(config, planned if config == given else None)
    verdict = judge(run.plan, run.costs, run.setting) if run is not None and hardware.gpus else None
    last = reading = None
    if run is not None and amount is not None:
        run, last = _with_amount(run, config, given, amount)
    if run is not None and subject.files is not None:
        itemsize = DTYPES[config.model.dtype].itemsize
        reading = disk_reading(subject.files, spec, itemsize, run.plan, run.estimate.period, memory.host)
    past = past_speed(given, used.names) if alone_here else None
    length = length_of(given, amount, run and run.estimate.period, last)
    if length and past:
        length = length.at_speed(past.tokens_per_second, past.run, given.data.max_length)
    return PlanReport(
        given,
        config,
        spec,
        used,
        hardware.devices,
        memory,
        advise(config, spec, hardware, memory, trained_shape, run and run.plan.stages),
        run,
        problem,
        (timings or (resumed[0].path if resumed else None)) if measured else None,
        _blocks(config, spec) if verdict else (),
        verdict,
        reading,
        product_types(config, hardware, run) if run and memory.fits and resumed is None and source is None else (),
        scaling(config, spec, hardware, nodes, run, memory, measured) if nodes and run else None,
        checks,
        length,
        past,
    )


@dataclass(frozen=True)
class _Subject:
    """What is planned: the run of a config, or the unfinished one that it would resume, on this or a described machine.

    `files`: of file-backed weights on this machine. `source`: the run whose measured times --timings names.
    """

    config: Config
    model_dir: Path
    spec: ModelSpec
    hardware: Hardware
    files: WeightFiles | None
    resumed: tuple[RunDir, Path] | None  # the run and its checkpoint
    source: MeasuredRun | None
    flags: MachineFlags
    nodes: Nodes | None

    @classmethod
    def of(cls, resolved: Resolved, flags: MachineFlags, timings: Path | None, nodes: Nodes | None) -> Self:
        config = resolved.config
        source = None if timings is None else MeasuredRun.open(timings)
        if flags.given or source is not None or nodes is not None:
            hardware = flags.machine(config, source.kinds if source else ())
            model_dir, spec = training_model(config)
        else:
            hardware, model_dir, spec = machine_and_model(resolved)
        if nodes is not None:
            network = replace(hardware.machine, network=nodes.rate)
            hardware = replace(hardware, machine=network, process=(nodes.count - 1, nodes.count))
        spec = for_hardware(spec, config, hardware)
        files = None
        if config.model.hold == "map" and hardware.here:
            with suppress(UserError):  # which `run_checks` reports
                files = find_files(config, model_dir, spec)
        resumed = _unfinished(resolved) if hardware.here else None
        hardware = with_saved(hardware, resumed)
        if resumed is not None:
            config = auto.recorded(config, resumed[0].config())
        if source is not None:
            config = source.with_micro_batch(config)
        return cls(config, model_dir, spec, hardware, files, resumed, source, flags, nodes)

    def times(self, choice: Config) -> Measured | None:
        """The measured times of `source` for a config without "auto"; None without a source."""
        if self.source is None:
            return None
        measured = self._of_a_node(self.source.times(choice, self.spec, self.hardware.used(choice)))
        return measured if self.flags.pcie is None else replace(measured, upload=None, download=None)

    def plan(
        self, config: Config, planned: tuple[RunPlan, MemoryPlan] | None
    ) -> tuple[RunPlan | None, MemoryPlan, str | None, Measured | None]:
        """The plan, its memory, why planning failed, and the measured times that it uses. `planned`: what is known."""
        measured = self.times(config)
        if self.source is None and self.resumed is not None and config.engine.replan:
            measured = load(self.resumed[0].path, Conditions.of(config, self.spec, self.hardware.used(config)))
            measured = measured and self._of_a_node(measured)
        run = problem = None
        try:
            run, memory = planned or plan_run(config, self.spec, self.hardware, measured)
            if measured and self.source is None and not memory.fits:  # a run does not use them either
                measured = None
                run, memory = plan_run(config, self.spec, self.hardware)
        except UserError as error:
            problem, memory = str(error), least_memory(config, self.spec, self.hardware)
        return run, memory, problem, measured

    def _of_a_node(self, measured: Measured) -> Measured:
        """The times of one machine as those of one of several, each of which updates a part of the weights."""
        return measured if self.nodes is None else replace(measured, update=measured.update / self.nodes.count)


def _with_amount(run: RunPlan, config: Config, given: Config, amount: Amount) -> tuple[RunPlan, float | None]:
    """The plan with the sequences that steps have, and the seconds of a short last step of an epoch, if there is one.

    `given`: the config before its steps were fitted to the data.
    """
    run = short_steps.with_sequences(run, config, amount.sequences)
    rest = amount.sequences % given.train.global_batch_size
    return run, short_steps.with_sequences(run, config, rest).estimate.period if rest else None


def _unfinished(resolved: Resolved) -> tuple[RunDir, Path] | None:
    """The run that training would resume, and whose times apply; None if it could not be resumed."""
    try:
        return find(resolved)
    except UserError:
        return None


def _blocks(config: Config, spec: ModelShape) -> tuple[BlockIntensity, ...]:
    """The paper's intensities of each kind of blocks: the sequences of a round share an upload of the parameters."""
    length, batch = config.data.max_length, config.train.sequences * config.round_size
    itemsize = DTYPES[config.model.dtype].itemsize
    kinds: dict[Sizes, list[str]] = {}
    for block in blocks(spec):
        if (sizes := block.sizes) is None:
            continue
        if not block.expert_products:  # the paper's dense models have no windows
            sizes = replace(sizes, window=None)
        units = [spec.units[unit] for unit in block.units]
        if any(unit.quantized or unit.wired for unit in units):
            weight = sum(unit.wire_bytes(itemsize) for unit in units) / sum(unit.numel for unit in units)
            sizes = replace(sizes, weight=weight)
        kinds.setdefault(sizes, []).append(block.name)
    return tuple(
        BlockIntensity(
            names[0],
            len(names),
            forward_intensity(sizes, length, batch, itemsize),
            backward_intensity(sizes, length, batch, itemsize),
        )
        for sizes, names in kinds.items()
    )


def write_pictures(plan: PlanReport, svg: Output | None, trace: Output | None) -> None:
    """Writes the simulated step as SVG and as trace events. Raises UserError without a plan, or if writing fails."""
    if svg is None and trace is None:
        return
    if plan.run is None:
        raise UserError("there is no plan to draw")
    shown = coarse(plan.run.plan, plan.run.costs)
    timeline = plan.timeline(shown)
    if svg is not None:
        title = f"{plan.config.model.path} on {plan.hardware.devices} × {plan.hardware.machine.card.name}"
        svg.write(picture.svg(timeline, ", ".join(filter(None, [title, shown.note]))))
    if trace is not None:
        trace.write(json.dumps(chrome_trace(timeline)))
