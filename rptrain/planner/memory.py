"""The memory that a run needs and the memory that is available: on the host, each GPU and the disk."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal

import torch

from rptrain.checkpoint.adapter import shapes
from rptrain.checkpoint.atomic_dir import SLACK
from rptrain.config.schema import Config
from rptrain.data.loader import RANDOM, RANDOM_ROWS
from rptrain.data.rows import SHORT
from rptrain.data.template import parts_bytes
from rptrain.engine.engine import ITERATIONS_AHEAD
from rptrain.engine.footprint import Footprint, StageMemories, stage_memory
from rptrain.engine.iteration import iteration_bytes
from rptrain.engine.memory.arena import aligned
from rptrain.engine.memory.moments import bytes_each
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.memory.store import REST, ModelStore, frozen_bytes
from rptrain.engine.meter import Measured
from rptrain.engine.transfer.staging import staging_bytes
from rptrain.machine.hardware import Gpu, Hardware, usable
from rptrain.models.spec import ModelShape
from rptrain.models.weights.file_backed import file_backed_units
from rptrain.models.weights.pretrained import stored_bytes
from rptrain.models.weights.quantized import loading_bytes
from rptrain.planner.choose import (
    LIBRARIES,
    Limits,
    RunPlan,
    exchange_bytes,
    least_footprint,
    make_plan,
    row_bytes,
    step_layout,
)
from rptrain.preflight.model import carried_bytes
from rptrain.runs.folder.run_dir import RunDir, forks
from rptrain.schedule.plan import Plan, Stage
from rptrain.utils.errors import UserError
from rptrain.utils.page_locks import locking_notes
from rptrain.utils.parallel import MAX_THREADS, most_threads
from rptrain.utils.units import format_bytes

# Host memory that CUDA uses, fitted to benchmarks/results/qwen3-1.7b-*.json (torch 2.11): their `process_pss_gib` less
# states, activations, hardware.LATER and 0.3 GiB of a program that has imported torch, with one GPU and two.
CUDA, CUDA_EACH = 1140 << 20, 159 << 20
# The code of transformers for tokenizers, measured as hardware.LATER was; a large vocabulary takes more.
TOKENIZERS = 28 << 20


Kind = Literal["host memory", "GPU memory", "disk space"]
# What uses it, and what to do if there is too little, besides advice: for a new run, and for one that is resumed
USES = {
    "host memory": (
        "weights, gradients, optimizer states, activations and the program itself",
        "",
        ": stop other programs that use it, or resume on a machine with more",
    ),
    "disk space": (
        "checkpoints and the exported model",
        ": make room, or set save.output_dir to another disk",
        ": make room",
    ),
}


@dataclass(frozen=True)
class MemoryPart:
    """A part of a place, and its bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlace:
    """The use of a memory in bytes, and its `limit`, which comes from `source`; None if unknown."""

    kind: Kind
    name: str
    parts: tuple[MemoryPart, ...]
    limit: int | None
    source: str
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if the limit is unknown."""
        return None if self.limit is None else self.total <= self.limit

    @property
    def missing(self) -> int:
        """Missing bytes."""
        return 0 if self.limit is None else max(0, self.total - self.limit)

    @property
    def allowed(self) -> str:
        """The available memory as a clause: "1.00 GiB is free on this machine"."""
        assert self.limit is not None
        if not self.source.startswith("free"):
            return f"{format_bytes(self.limit)} {self.source} allows"
        where = "on this machine" if self.source == "free" else self.source.removeprefix("free ")
        return f"{format_bytes(self.limit)} is free {where}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the fields, with `total` and `fits`; a part has `name` and `nbytes`."""
        return {**asdict(self), "total": self.total, "fits": self.fits}

    def to_event(self) -> dict[str, Any]:
        """The fields of a run's event."""
        parts = [[part.name, part.nbytes] for part in self.parts]
        return {"name": self.name, "kind": self.kind, "parts": parts, "limit": self.limit}


@dataclass(frozen=True)
class MemoryPlan:
    """All places of a run. `gpus` is empty with CPU workers; `disk` is None for a hypothetical machine."""

    host: MemoryPlace
    gpus: tuple[MemoryPlace, ...]
    disk: MemoryPlace | None

    @property
    def places(self) -> tuple[MemoryPlace, ...]:
        return (self.host, *self.gpus, *([] if self.disk is None else [self.disk]))

    @property
    def fits(self) -> bool:
        return not any(place.missing for place in self.places)

    def problems(self, *, resumed: bool) -> Iterator[tuple[Kind, str]]:
        """What is too small of host and disk, in words. Plans always fit the GPUs. A `resumed` run keeps its folder
        and most settings.
        """
        for place in (self.host, self.disk):
            if place is not None and place.missing:
                use, *remedies = USES[place.kind]
                needed, remedy = format_bytes(place.total), remedies[resumed]
                yield place.kind, f"the run needs {needed} of {place.kind} for {use}, but {place.allowed}{remedy}"

    def check(self, *, resumed: bool) -> None:
        """Raises UserError with all `problems`."""
        if found := [text for _, text in self.problems(resumed=resumed)]:
            raise UserError("\n".join(found))


def plan_run(
    config: Config,
    spec: ModelShape,
    hardware: Hardware,
    measured: Measured | None = None,
    near: Sequence[Stage] | None = None,
) -> tuple[RunPlan, MemoryPlan]:
    """The plan of a config without "auto", and the memory it needs.

    Rounds with fewer micro-batches than devices use fewer devices. `near` makes the search short
    (schedule/search.py). Raises UserError if a single layer does not fit on a GPU.
    """
    hardware = hardware.used(config)
    layout = step_layout(config, hardware.machine.card, hardware.share(config))
    available = hardware.host
    if available is not None:
        fixed = [*_process(config, spec, layout, hardware), *_staging(spec, layout, hardware)]
        available -= sum(part.nbytes for part in fixed)
    limits = Limits(hardware.tensor_bytes, available, hardware.tensor_source)
    run = make_plan(spec, hardware.machine, layout, limits, measured=measured, near=near)
    workers = 0 if hardware.gpus else sum(worker_bytes(spec, run))
    return run, _memory(config, spec, layout, hardware, run.device, activations=run.boundary_bytes, workers=workers)


def least_memory(config: Config, spec: ModelShape, hardware: Hardware) -> MemoryPlan:
    """A lower bound of the memory of all plans.

    On each GPU, one layer per stage; on the host, the activations of the fewest stages whose slots fit on a GPU.
    """
    hardware = hardware.used(config)
    layout = step_layout(config, hardware.machine.card, hardware.share(config))
    stages = 1
    if hardware.tensor_bytes is not None:
        whole = stage_memory(spec, Stage("FB", 0, len(spec.stack)), layout)
        stages = max(1, ceil(sum(whole) / max(hardware.tensor_bytes, 1)))
    boundary = aligned(layout.tokens * spec.hidden_size * layout.dtype.itemsize)
    activations = (stages + 1) * layout.at_once * boundary
    device = least_footprint(spec, layout, layout.width(hardware.devices))
    return _memory(config, spec, layout, hardware, device, activations=activations, workers=0)


def _memory(
    config: Config,
    spec: ModelShape,
    layout: StepLayout,
    hardware: Hardware,
    device: Footprint,
    *,
    activations: int,
    workers: int,
) -> MemoryPlan:
    """The memory plan. On the host, written pages count; pages of files that are read can be reclaimed and do not."""
    return MemoryPlan(
        _host(config, spec, layout, hardware, activations, workers),
        tuple(_gpu(gpu, device) for gpu in hardware.gpus),
        _disk(config, spec, layout, hardware.saved) if hardware.here else None,
    )


def state_parts(spec: ModelShape, layout: StepLayout) -> list[MemoryPart]:
    """The buffers of ModelStore, under the names that a person sees."""
    formats = sorted({param.format.name for unit in spec.units for param in unit.quantized if param.format})
    twice = ", 2 generations" if layout.asynchronous else ""
    wired = any(unit.wired for unit in spec.units)
    names = {
        "frozen": f"frozen weights, matrices in {' and '.join(formats)}" if formats else "frozen weights",
        "params": "weights" if wired else f"weights{twice}",
        "wire": f"weights in FP8 for the devices{twice}",
        "grad": _gradients(layout),
        "remainder": "rest of the float32 weights",
        "masters": "float32 weights",
    }
    sizes: dict[str, int] = {}
    for buffer, size in ModelStore.sizes(spec, layout).items():
        name = names.get(buffer, "optimizer state")
        sizes[name] = sizes.get(name, 0) + size
    return [MemoryPart(name, size) for name, size in sizes.items() if size or name != names["frozen"]]


def _gradients(layout: StepLayout) -> str:
    if layout.replicas > 1:
        return f"gradients of {layout.replicas} replicas"
    return "gradients, summed over rounds" if layout.wide_grad else "gradients"


def _staging(spec: ModelShape, layout: StepLayout, hardware: Hardware) -> list[MemoryPart]:
    """Buffers for file-backed weights. The weights themselves are page cache, which the system reclaims on demand."""
    if not (layout.file_backed and file_backed_units(spec)):
        return []
    return [MemoryPart("buffers of file-backed weights", staging_bytes(spec, layout.dtype, hardware.devices))]


def _answers(config: Config, spec: ModelShape, layout: StepLayout) -> list[MemoryPart]:
    """Copies of the weights of a layer, which the CPU makes while it answers log.sample_prompts."""
    if not config.log.sample_prompts:
        return []
    read = file_backed_units(spec) if layout.file_backed else ()
    copied = [unit.numel if index in read else unit.dequantized_numel for index, unit in enumerate(spec.units)]
    most = max(sum(copied[unit] for unit in layer.units) for layer in spec.stack)
    return [MemoryPart("answers to sample prompts", most * layout.dtype.itemsize)] if most else []


def _process(config: Config, spec: ModelShape, layout: StepLayout, hardware: Hardware) -> list[MemoryPart]:
    """Host memory that does not depend on the plan, except the states."""
    batch = iteration_bytes(layout)
    parts = [MemoryPart("batches in progress", (ITERATIONS_AHEAD + 1) * batch)]
    if sets := sum(source.path == RANDOM for source in config.data.train):
        parts.append(MemoryPart("random tokens", sets * RANDOM_ROWS * config.data.max_length * 4))
    if sets < len(config.data.train):
        parts.append(MemoryPart("tokenizer", TOKENIZERS))
    if hardware.gpus:
        parts.append(MemoryPart("CUDA", CUDA + CUDA_EACH * len(hardware.gpus)))
    if each := loading_bytes(spec):
        parts.append(MemoryPart("quantizing", each * (most_threads() if hardware.here else MAX_THREADS)))
    parts += _answers(config, spec, layout)
    return [*parts, MemoryPart("the program and its libraries", hardware.program)]


def _host(
    config: Config, spec: ModelShape, layout: StepLayout, hardware: Hardware, activations: int, workers: int
) -> MemoryPlace:
    rows = row_bytes(spec, layout)
    parts = [*state_parts(spec, layout), MemoryPart("activations between stages", activations)]
    parts += (staging := _staging(spec, layout, hardware))
    if rows:
        parts.append(MemoryPart("sums of the embedding's gradient", rows))
    if exchanged := exchange_bytes(spec, layout):
        parts.append(MemoryPart("gradients of other processes", exchanged))
    if workers:
        parts.append(MemoryPart(f"memory of {hardware.devices} CPU workers", workers))
    notes = []
    if layout.file_backed:
        file_backed = frozen_bytes(spec, layout.dtype) - frozen_bytes(spec, layout.dtype, file_backed=True)
        notes.append(f"{format_bytes(file_backed)} of weights stay in the model's files, and are not counted")
    if any(source.path != RANDOM for source in config.data.train):
        notes.append("the data is not read: its tokens stay on the disk; up to 100 bytes a sample are not counted")
    if hardware.host_source == "--host":
        notes.append(
            f"a process can use about {usable(100, len(hardware.gpus))}% of the memory that --host installs: firmware "
            "and kernel take the rest, in part to page-lock it"
        )
    if hardware.gpus and hardware.here:
        copied = activations + sum(ModelStore.sizes(spec, layout, copied=True).values())
        notes += locking_notes(copied + sum(part.nbytes for part in staging))
    parts += _process(config, spec, layout, hardware)
    return MemoryPlace("host memory", "host", tuple(parts), hardware.host, hardware.host_source, tuple(notes))


def long_text_warning(longest: int, host: MemoryPlace, program: int) -> str:
    """A warning if the longest sample (tokens) does not fit on the host while it is tokenized, before the
    run's buffers exist, beside the `program`; otherwise empty.
    """
    needed = program + TOKENIZERS + parts_bytes(longest)
    if longest <= SHORT or host.limit is None or needed <= host.limit:
        return ""
    return (
        f"the longest sample has {longest:,} tokens: with the program, tokenizing it takes about "
        f"{format_bytes(needed)} of host memory, but {host.allowed}: split this sample into several"
    )


def worker_bytes(spec: ModelShape, run: RunPlan) -> list[int]:
    """Bytes of its buffers that each CPU worker writes to.

    Buffers have the size of the largest stages, but a stage may never come to a worker, or always to the same end of a
    buffer.
    """
    taken, memories = [], StageMemories(spec, run.layout)
    for stages in _programs(run.plan):
        memory = [memories.of(stage) for stage in stages]
        params = min(_at_ends([one.params for one in memory]), run.device.params)
        sums = min(_at_ends([one.sums for one in memory if one.sums]), run.device.sums)
        rest = max(one.prepared for one in memory) + max(one.work for one in memory)
        rest += run.device.rounded + run.device.rings + run.device.indices
        taken.append(params + sums + rest)
    return taken


def _at_ends(sizes: Sequence[int]) -> int:
    """The largest sizes at both ends of a buffer that are used in turn."""
    return sum(max(sizes[end::2], default=0) for end in (0, 1))


def _programs(plan: Plan) -> list[list[Stage]]:
    """The stages of each device, in order, until the sequence repeats."""
    programs: list[list[Stage]] = [[] for _ in range(plan.devices)]
    plan = replace(plan, micro_batches=plan.round_size * plan.replicas)  # later rounds are as those of later steps
    for iteration in range(2 * plan.devices):
        for slot in plan.slots(iteration):
            programs[slot.device].append(slot.stage)
    return programs


def _gpu(gpu: Gpu, need: Footprint) -> MemoryPlace:
    parts = (
        MemoryPart("parameters of two stages", need.params),
        *([MemoryPart("dequantized or FP8 parameters of a stage", need.prepared)] if need.prepared else []),
        MemoryPart("gradients of two stages", need.sums + need.rounded),
        MemoryPart("boundary activations", need.rings),
        MemoryPart("tokens of two steps", need.indices),
        MemoryPart("workspace of the largest stage", need.work),
        MemoryPart("libraries", LIBRARIES),
        MemoryPart("CUDA context", gpu.context),
    )
    return MemoryPlace("GPU memory", gpu.name, parts, gpu.limit, gpu.source)


def with_saved(hardware: Hardware, found: tuple[RunDir, Path] | None) -> Hardware:
    """The hardware for a resumed run and its checkpoint: the run's checkpoints are already on the disk."""
    if found is None or forks(*found):
        return hardware  # an older checkpoint starts a new run
    paths = found[0].checkpoints()
    return replace(hardware, saved=sum(f.stat().st_size for path in paths for f in path.rglob("*") if f.is_file()))


def _disk(config: Config, spec: ModelShape, layout: StepLayout, saved: int) -> MemoryPlace:
    """Checkpoints, one more than are kept while it is written, and the exported model.

    The `saved` bytes of earlier checkpoints that stay or will be deleted count as available, except for the checkpoint
    to be written.
    """
    itemsize, moments = layout.dtype.itemsize, bytes_each(layout.moments, layout.wide)
    trained = [unit for unit in spec.units if unit.trainable]
    one = int(sum((_weight_bytes(unit.dtype_in(layout.dtype)) + moments) * unit.numel for unit in trained))
    if layout.asynchronous:
        one += sum(unit.wire_bytes(itemsize) for unit in trained)  # the generation before
    written, keep = saves(config), config.save.save_total_limit
    if keep == 1 and config.save.load_best_model_at_end:
        keep = 2  # the newest and the best
    notes = []
    if written is None and keep is None:
        notes.append("every checkpoint is kept, and how many there will be is not known: one is counted")
    count = min((n for n in (written, None if keep is None else keep + 1) if n is not None), default=1)
    output = Path(config.save.output_dir).absolute()
    place = next(folder for folder in (output, *output.parents) if os.path.isdir(folder))  # False if too long
    usage = shutil.disk_usage(place)
    if config.adapters:
        exported = itemsize * sum(map(prod, shapes(spec).values()))
    else:
        exported = stored_bytes(spec, layout.dtype) + carried_bytes(config, spec)
    earlier = min(saved, (count - 1) * one)
    source = (
        f"free in {place}" if not earlier else f"free in {place}, with the {format_bytes(earlier)} of its checkpoints"
    )
    return MemoryPlace(
        "disk space",
        "disk",
        (
            MemoryPart("checkpoint" if count == 1 else f"{count} checkpoints of {format_bytes(one)}", count * one),
            MemoryPart("exported model", exported),
            MemoryPart("reserve for small files", SLACK),
        ),
        usage.free + earlier if usage.total else None,  # /proc and the like have no size
        source,
        tuple(notes),
    )


def _weight_bytes(dtype: torch.dtype) -> int:
    """Bytes of a master weight whose parameter has this type."""
    return dtype.itemsize + sum(kind.itemsize for kind in REST.get(dtype, {}).values())


def saves(config: Config) -> int | None:
    """The number of checkpoints that a run writes; None if its number of steps depends on the data."""
    steps, every = config.train.max_steps, config.save.save_steps
    if not every:
        return 1
    if steps is None and all(source.path == RANDOM for source in config.data.train):
        per_epoch = ceil(len(config.data.train) * RANDOM_ROWS / config.train.global_batch_size)
        steps = max(1, ceil(config.train.num_epochs * per_epoch))
    return None if steps is None else ceil(steps / every)
