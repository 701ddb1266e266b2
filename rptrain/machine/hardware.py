"""Devices of this or of a hypothetical machine, and the memory of each device and of the host."""

import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import psutil
import torch

from rptrain.config.schema import Config, Engine
from rptrain.engine.devices.accelerator import Accelerator, accelerator
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.failures import gpu_failure
from rptrain.engine.memory.share import Share
from rptrain.engine.optim.adam import default_threads
from rptrain.machine.gpus import resolve, unusable
from rptrain.machine.rates import measured_links, measured_rates
from rptrain.schedule.machine import CPU, GB, GIB, Card, Machine, Rates, card_named
from rptrain.utils import numa
from rptrain.utils.errors import UserError
from rptrain.utils.host_memory import available_bytes
from rptrain.utils.parallel import cores
from rptrain.utils.units import format_bytes

MARGIN = 256 << 20  # bytes of a GPU that stay unused without a limit: displays, growth of other processes
PROGRAM = 384 << 20  # bytes of a training process without everything planned, for hypothetical machines
# Why a plan has its card: it is in this machine, a flag names it or a run was measured on it, or else it is assumed.
CardSource = Literal["this machine", "--card", "--timings", "assumed"]
CONTEXT = 512 << 20  # bytes of a CUDA context on a hypothetical GPU, and where it cannot be measured
CONTEXTS = (128 << 20, 2 << 30)  # the least and the most: others may take or free memory while it is measured
# Memory of the kernel and the driver per page-locked byte: page tables, and lists of the pages for each GPU. Measured
# on H200s (driver 580): 1.4% with one, 1.8% with two and 2.7 to 3.1% with four.
LOCKING, LOCKING_EACH = 0.0095, 0.0047
# MemTotal of /proc/meminfo per installed byte: one in 64 describes the pages, firmware and the kernel take the rest.
# Published: 0.981 of 64 GiB (65,820,456 kB), 0.983 of 128 GiB (131,917,312 kB) and of 256 GiB (263,773,100 kB), 0.984
# of 512 GiB (528,168,748 kB).
MEM_TOTAL = 0.98
# Growth of a process once it trains, measured with torch 2.13 on the CPU. For GPUs: modules, of which
# `torch.use_deterministic_algorithms` imports the compiler's; memory.CUDA includes the rest. CPU workers do not need
# these modules: theirs is the size of thread stacks and of code that is first used.
LATER = {"torch._inductor.config": 72 << 20, "triton": 66 << 20}
LATER_CPU = 28 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory, in bytes."""

    name: str
    context: int  # bytes of the CUDA context
    tensor_bytes: int  # including those for libraries
    source: str  # source of the limit: a key, a flag, the card, or "free"
    most: int  # the largest useful engine.vram_limit
    others: int = 0  # bytes that other processes use

    @property
    def limit(self) -> int:
        return self.context + self.tensor_bytes


@dataclass(frozen=True)
class Hardware:
    """The hardware that a run is planned for: devices, their rates and memory, and host memory."""

    machine: Machine
    gpus: tuple[Gpu, ...]  # empty: CPU workers
    host: int | None  # bytes that the process may have in total; None: unknown
    host_source: str
    host_most: int | None  # the largest useful engine.host_limit; None: unknown
    program: int  # bytes of the process itself when it trains: code, libraries, threads
    here: bool
    process: tuple[int, int] = (0, 1)  # the number of this process, and how many train the model
    saved: int = 0  # bytes on disk of the checkpoints of the resumed run
    warnings: tuple[str, ...] = ()  # of what is probably not meant, as sentences
    card_source: CardSource = "this machine"

    @property
    def devices(self) -> int:
        return self.machine.devices

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices, one per worker."""
        return tuple(gpu.name for gpu in self.gpus) or tuple(f"cpu:{index}" for index in range(self.devices))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The model names of the devices, each once; on a hypothetical machine the name of the card's profile."""
        return tuple(sorted({device_kind(name) for name in self.names})) if self.here else (self.machine.card.name,)

    @property
    def tensor_bytes(self) -> int | None:
        """Bytes for tensors on each GPU; None for CPU workers."""
        return min((gpu.tensor_bytes for gpu in self.gpus), default=None)

    @property
    def tensor_source(self) -> str:
        """The source of `tensor_bytes`, as the subject of a sentence."""
        if not self.gpus:
            return "the host"
        least = min(self.gpus, key=lambda gpu: gpu.tensor_bytes)
        return f"what is free on {least.name}{_beside(least.others)}" if least.source == "free" else least.source

    def share(self, config: Config) -> Share | None:
        """The share of this process in a run with a config without "auto", if several train the model.

        Raises UserError if there are fewer replicas than processes.
        """
        rank, world = self.process
        if world == 1:
            return None
        if config.replicas < world:
            raise UserError(
                f"engine.replicas = {config.replicas}, but {world} processes need at least one replica each: set "
                f'engine.replicas to {world} or more, or to "auto"'
            )
        return Share(rank, world, config.replicas)

    def groups(self, config: Config) -> int:
        """The groups of replicas that this process computes."""
        share = self.share(config)
        return config.replicas if share is None else len(share.groups)

    def first(self, count: int) -> "Hardware":
        """The hardware with at most `count` of the devices."""
        count = min(count, self.devices)
        return replace(self, machine=replace(self.machine, devices=count), gpus=self.gpus[:count])

    def divisible(self, config: Config) -> bool:
        """Whether the devices that a config without "auto" keeps busy can be divided into its groups."""
        groups = self.groups(config)
        devices = min(config.round_size * groups, self.devices)
        return devices < groups or devices % groups == 0

    def used(self, config: Config) -> "Hardware":
        """The devices that a config without "auto" keeps busy: at most one per micro-batch of a round, in each group.

        Raises UserError if they cannot be divided into groups.
        """
        replicas = self.groups(config)
        used = self.first(config.round_size * replicas)
        if self.divisible(config):
            return used
        kind = "GPUs" if self.gpus else "CPU workers"
        size = 1 if config.engine.round_size is None else config.round_size
        rounds = config.train.micro_batches // size  # as many as there can be
        groups = [n for n in range(1, used.devices + 1) if used.devices % n == rounds % n == 0]
        nearest = sorted(sorted(groups, key=lambda n: abs(n - replicas))[:2])
        fewer = f"use {used.devices // replicas * replicas} {kind} (engine.devices)"
        if self.process[1] > 1:
            raise UserError(
                f"{self.process[1]} processes share engine.replicas = {config.replicas}, and the {replicas} of this "
                f"process do not divide its {used.devices} {kind}: {fewer}, or start a new run with another "
                "engine.replicas"
            )
        raise UserError(
            f"engine.replicas = {replicas} does not divide {used.devices} {kind}: {fewer}, or start a new run with "
            f"engine.replicas = {' or '.join(map(str, nearest))}"
        )

    def limited(self, engine: Engine) -> "Hardware":
        """The hardware with the limits of another config, as far as that much memory exists."""
        gpus, host = self.gpus, self.host
        if limit := engine.vram_limit:
            gpus = tuple(
                replace(gpu, tensor_bytes=min(limit, gpu.most) - gpu.context, source="engine.vram_limit")
                for gpu in gpus
            )
        if engine.host_limit:
            host = min(engine.host_limit, self.host_most or engine.host_limit)
        return replace(self, gpus=gpus, host=host)


def program_bytes() -> int:
    """The memory of this process now: its proportional set size, because pages of libraries may be shared. All of its
    memory, if the kernel does not tell (some sandboxes have no /proc/self/smaps).
    """
    info = psutil.Process().memory_full_info()
    return getattr(info, "pss", info.rss)


def here(engine: Engine, launch: Launch | None = None) -> Hardware:
    """This machine's devices that the config names, and its memory. If torchrun started several processes on this
    machine, each has its part of them: process i has every n-th device, from device i on.

    Raises UserError if they do not exist, cannot do engine.fp8, are GPUs of different models, or are fewer than the
    processes.

    Call it once, before anything of a run is loaded: the memory of the process then counts as the program's.
    """
    now = program_bytes()  # before the first context, which is counted separately
    local_rank, sharing = (0, 1) if launch is None else (launch.local_rank, launch.local_world)
    free = available_bytes() // sharing + now
    names = resolve(engine.devices)[local_rank::sharing]
    if not names:
        raise UserError(
            f'engine.devices = "{engine.devices}" names fewer devices than the {sharing} processes of this machine: '
            "start fewer processes (torchrun --nproc-per-node), or set engine.devices"
        )
    if engine.fp8:
        check_fp8(names)
    check_alike(engine.devices, names)
    gpus = gpu_memory(names, engine.vram_limit)
    free = lockable(free, len(gpus))
    limit, source = (engine.host_limit // sharing, "engine.host_limit") if engine.host_limit else (free, "free")
    program = now + _growth(cuda=bool(gpus))
    threads = max(1, (engine.optimizer_threads or default_threads()) // sharing)
    process = (0, 1) if launch is None else (launch.rank, launch.world)
    hardware = Hardware(machine(names, threads), gpus, limit, source, free, program, here=True, process=process)
    return replace(hardware, warnings=tuple(_warnings(engine, gpus)))


def lockable(free: int, gpus: int) -> int:
    """The part of free host memory that can be page-locked for this many GPUs. Without GPUs nothing is locked."""
    return int(free / (1 + LOCKING + LOCKING_EACH * gpus)) if gpus else free


def usable(installed: int, gpus: int) -> int:
    """The bytes that a process may have on a machine with this much memory and this many GPUs, and nothing else."""
    return lockable(int(installed * MEM_TOTAL), gpus)


def installed_for(nbytes: int, gpus: int) -> int:
    """The least memory to install, in bytes, of which `nbytes` are usable: GiB, rounded up by at most a sixteenth."""
    size = 1
    while usable(size * GIB, gpus) < nbytes:
        size += 1 << max(0, size.bit_length() - 5)
    return size * GIB


def check_fp8(devices: Iterable[str]) -> None:
    """Raises UserError if a GPU among these devices has no products of FP8 matrices."""
    for name in (name for name in devices if name.startswith("cuda")):
        target = accelerator(name).target
        if not target.has_fp8:
            raise UserError(
                "engine.fp8 needs GPUs of compute capability 8.9 or more (RTX 4090, L40S, H100 and newer), and "
                f"{name} has {target.version}: remove engine.fp8, or leave {name} out of engine.devices"
            )


def check_alike(text: str, devices: Sequence[str]) -> None:
    """Raises UserError if the GPUs among the devices that engine.devices = `text` names are of different models.

    A plan has one time for each stage, on any device. Models are equal only if the names and architectures are.
    """
    models: dict[Accelerator, list[str]] = {}
    for name in (name for name in devices if name.startswith("cuda")):
        models.setdefault(accelerator(name), []).append(name.removeprefix("cuda:"))
    if len(models) > 1:
        most_first = sorted(models.items(), key=lambda item: -len(item[1]))
        choices = [f'engine.devices = "cuda:{",".join(indices)}" ({model})' for model, indices in most_first]
        raise UserError(
            f'engine.devices = "{text}" names GPUs of different models, but a run needs GPUs of one model: set '
            + " or ".join(choices)
        )


def _growth(*, cuda: bool) -> int:
    """Bytes that training on GPUs, or on CPU workers, adds to the program."""
    if not cuda:
        return LATER_CPU
    return sum(
        nbytes
        for module, nbytes in LATER.items()
        if module not in sys.modules and find_spec(module.partition(".")[0]) is not None
    )


def planned(
    card: Card,
    count: int | None,
    host: int | None,
    engine: Engine,
    *,
    vram_source: str | None = None,
    card_source: CardSource = "--card",
) -> Hardware:
    """`count` cards of a hypothetical machine; by default as many as the config names, or one.

    `host`: bytes of installed memory, None if unknown. `vram_source`: the source of the card's memory, if it is not the
    card. The config's limits apply. Raises UserError if engine.vram_limit is more than the card has, or if the card
    has no FP8 and the config needs it.
    """
    if engine.fp8 and card.rates.fp8 is None:
        raise UserError(f"engine.fp8 needs GPUs with FP8 matrix units, which the {card.name} lacks: remove engine.fp8")
    if count is None:
        count = len(engine.devices.split(",")) if engine.devices.startswith("cuda:") else 1
    source = "engine.vram_limit" if engine.vram_limit else vram_source or card.name
    tensor_bytes = _tensor_bytes(
        card.name, engine.vram_limit, CONTEXT, source, free=card.vram - CONTEXT, total=card.vram
    )
    gpus = tuple(Gpu(f"cuda:{index}", CONTEXT, tensor_bytes, source, card.vram) for index in range(count))
    most = None if host is None else usable(host, count)
    limits = [(size, name) for size, name in ((most, "--host"), (engine.host_limit, "engine.host_limit")) if size]
    limit, named = min(limits, default=(None, "not known"))
    hypothetical = Machine(card, count, threads=engine.optimizer_threads or Machine.threads)
    return Hardware(hypothetical, gpus, limit, named, most, PROGRAM, here=False, card_source=card_source)


def device_kind(device: str) -> str:
    """The model name of a GPU or of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def machine(devices: Sequence[str], threads: int | None = None) -> Machine:
    """The rates of existing devices, and of the host with these `threads` of the optimizer.

    Rates of products, and rates of links, are measured if `rptrain doctor` measured those of all devices, otherwise
    estimated. Peaks are those of a known card's profile, otherwise guessed from the driver's figures.
    """
    host, threads = min(8 * GB * cores(), 150 * GB * numa.sockets()), threads or default_threads()
    if not devices[0].startswith("cuda"):
        return Machine(CPU, len(devices), host, threads)
    properties = torch.cuda.get_device_properties(devices[0])
    card = card_named(properties.name)
    if card is None:
        peak = _guessed_peak(accelerator(devices[0]), properties.multi_processor_count)
        card = Card(properties.name, properties.total_memory, peak, 1000 * GB, 25 * GB)
    card, links = replace(card, measured=measured_rates(devices)), measured_links(devices)
    if links is None:
        return Machine(card, len(devices), host, threads)
    return Machine(replace(card, pcie=links.alone), len(devices), host, threads, links.together, links.date)


def _guessed_peak(found: Accelerator, multiprocessors: int) -> Rates:
    """Rates of a card without a profile: a multiprocessor of recent cards reaches about 1 TFLOP/s in bfloat16."""
    rate = float(multiprocessors)
    return Rates(rate, 2 * rate if _is_geforce(found.name) else rate, 2 * rate if found.target.has_fp8 else None)


def sums_at_half_rate(card: Card) -> bool:
    """Whether products of 16-bit matrices with float32 sums run at half of the card's rate: GeForce cards do that."""
    return card.peak.fp16 > 1.5 * card.peak.bf16 or _is_geforce(card.name)


def _is_geforce(name: str) -> bool:
    return "geforce" in name.lower()


def gpu_memory(devices: Sequence[str], vram_limit: int | None) -> tuple[Gpu, ...]:
    """Each GPU's memory: the limit or the free memory, less the CUDA context. Empty for CPU workers.

    Raises UserError if the limit is more than a GPU has, or less than the context takes, or if a GPU fails or has no
    memory for a context.
    """
    from rptrain.engine.devices.cuda import context_bytes

    gpus = []
    for name in devices:
        if not name.startswith("cuda"):
            continue
        index = int(name.partition(":")[2])
        try:
            context = context_bytes(index)
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            if (failed := gpu_failure(error)) is None:
                raise
            raise UserError("\n".join(replace(failed, device=name).lines())) from error
        used, (least, most) = total - free, CONTEXTS
        context = min(CONTEXT if context is None else min(max(context, least), most), used)
        others = used - context
        source = "engine.vram_limit" if vram_limit is not None and vram_limit - context <= free else "free"
        said = f"what is free{_beside(others)}" if source == "free" else source
        tensor_bytes = _tensor_bytes(name, vram_limit, context, said, free=free, total=total)
        gpus.append(Gpu(name, context, tensor_bytes, source, min(free + context, total), others))
    return tuple(gpus)


def _beside(others: int) -> str:
    return f" (other processes use {format_bytes(others)})" if others > MARGIN else ""


def _warnings(engine: Engine, gpus: Sequence[Gpu]) -> Iterator[str]:
    """What is probably not meant: GPUs that are hidden, and a limit that other processes leave no room for."""
    if engine.devices == "auto" and not gpus and (found := unusable()) is not None:
        yield f"workers run on the CPU, because {found}"
    for gpu in gpus:
        if engine.vram_limit is not None and gpu.source == "free":
            yield (
                f"engine.vram_limit is {format_bytes(engine.vram_limit)}, but {gpu.name} has "
                f"{format_bytes(gpu.most)} left{_beside(gpu.others)}"
            )


def _tensor_bytes(name: str, vram_limit: int | None, context: int, source: str, *, free: int, total: int) -> int:
    """Bytes for tensors on a GPU."""
    if vram_limit is not None and vram_limit > total:
        raise UserError(
            f"engine.vram_limit is {format_bytes(vram_limit)}, but {name} has {format_bytes(total)}: lower or remove it"
        )
    tensor_bytes = min(vram_limit - context, free) if vram_limit is not None else free - MARGIN
    if tensor_bytes <= 0:
        has = f"{format_bytes(free)} free" if free >= 0 else format_bytes(total)
        raise UserError(
            f"{source} leaves nothing for tensors: {name} has {has}, and the CUDA context takes {format_bytes(context)}"
        )
    return tensor_bytes
