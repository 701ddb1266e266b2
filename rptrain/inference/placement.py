"""Where a model answers, chosen before anything is loaded, with the speed to expect."""

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch

from rptrain.models.decode.cache import cache_bytes
from rptrain.models.layers.block import blocks
from rptrain.models.spec import ModelSpec
from rptrain.schedule.machine import TRAFFIC
from rptrain.utils.errors import UserError
from rptrain.utils.text import counted
from rptrain.utils.units import format_bytes, format_rate

Kind = Literal["gpu", "streamed", "cpu"]
SLOTS = 2  # blocks that are on the GPU while the others are in host memory: one is read, the next one arrives
FREE = 0.8  # fraction of free memory for weights, keys and values; the rest is for temporaries
TOKENS = 4096  # of a conversation, whose keys and values must fit beside the weights
# Chosen for benchmarks/results/placements.json. A token is so little work that starting the operations takes longer
# than they do.
GPU_LAYER = 1e-3  # seconds of a token in a layer, besides reading its weights
QUANTIZED_LAYER = 1e-3  # more seconds if its weights are dequantized
CPU_LAYER = 0.5e-3
CPU_TRAFFIC = 0.4  # fraction of the bandwidth of host memory that a product with one token reaches


@dataclass(frozen=True)
class FreeMemory:
    """The free memory of this machine in bytes, and rates in bytes per second."""

    host: int
    host_rate: float  # of host memory
    gpu: str = ""  # the name of the first GPU; empty: there is none
    vram: int = 0
    vram_rate: float = 0.0  # of the GPU's own memory
    link_rate: float = 0.0  # from host memory to the GPU
    training: str = ""  # the name of a run that trains on this machine
    no_gpu: str = "this machine has no CUDA GPU"  # why `gpu` is empty, a sentence without its end


@dataclass(frozen=True)
class Sizes:
    """What a model takes, in bytes."""

    weights: int  # dequantized, as the CPU reads them
    cache: int  # keys and values of `sequences` of `longest` tokens
    read: int  # weights that a token reads
    layers: int
    packed: int  # weights in the formats that the run holds them in, as the GPU keeps them
    blocks: int  # of these, weights of blocks
    block: int  # of these, weights of the largest block
    sequences: int = 1
    longest: int = TOKENS
    lower: str = ""  # what takes less memory, if anything does: the beginning of "… free memory"

    @classmethod
    def of(
        cls, spec: ModelSpec, dtype: torch.dtype, sequences: int = 1, longest: int = TOKENS, lower: str = ""
    ) -> "Sizes":
        weights = spec.weight_bytes(dtype)
        read = sum(_read(spec, index) for index in range(len(spec.stack))) * dtype.itemsize
        units = [unit.nbytes(dtype.itemsize) for unit in spec.units]
        blocks = [sum(units[unit] for unit in layer.units) for layer in spec.layers]
        cache = cache_bytes(spec, sequences, longest, dtype)
        packed = sum(units), sum(blocks), max(blocks)
        return cls(weights, cache, int(read), len(spec.stack), *packed, sequences, longest, lower)

    def needed(self, kind: Kind) -> int:
        """Bytes of the device's memory: of the GPU, or of the host."""
        weights = {"cpu": self.weights, "gpu": self.packed}
        return weights.get(kind, self.packed - self.blocks + SLOTS * self.block) + self.cache


@dataclass(frozen=True)
class Placement:
    """Where a model answers and why, and the speed to expect."""

    kind: Kind
    reason: str  # a sentence without its end
    nbytes: int  # of weights
    tokens_per_second: float  # expected

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.kind == "cpu" else "cuda:0")

    def __str__(self) -> str:
        where = {"gpu": "on the GPU", "streamed": "in host memory for the GPU", "cpu": "on the CPU"}[self.kind]
        return f"{format_bytes(self.nbytes)} {where}, about {format_rate(self.tokens_per_second)} expected"


def choose(sizes: Sizes, memory: FreeMemory, wanted: str = "auto") -> Placement:
    """The fastest placement with enough free memory; beside a training, the CPU. `wanted`: a Kind, or "auto".

    Raises UserError if the model does not fit.
    """
    if wanted not in ("auto", *get_args(Kind)):
        raise UserError(f"unknown placement {wanted!r}: use one of auto, {', '.join(get_args(Kind))}")
    if wanted in ("gpu", "streamed") and not memory.gpu:
        raise UserError(f"{memory.no_gpu}: use the placement cpu")
    possible: list[Kind] = sorted(
        _fitting(sizes, memory), key=lambda kind: -_speed(sizes, memory, kind)
    )  # the fastest first
    if wanted != "auto":
        if wanted not in possible:
            raise UserError(f"{_needs(sizes)}, too much for the placement {wanted}: {_free(memory)}")
        return _placement(sizes, memory, possible[possible.index(wanted)], "chosen")
    allowed: list[Kind] = [kind for kind in possible if kind == "cpu" or not memory.training]
    if not allowed:
        more = f", or use the placement {possible[0]} while {memory.training} trains" if possible else ""
        raise UserError(f"{_needs(sizes)}; {_free(memory)}: {sizes.lower}free memory{more}")
    return _placement(sizes, memory, allowed[0], _why(allowed[0], memory))


def speeds(sizes: Sizes, memory: FreeMemory) -> dict[Kind, float]:
    """The tokens per second to expect of each placement with enough free memory."""
    return {kind: _speed(sizes, memory, kind) for kind in _fitting(sizes, memory)}


def _placement(sizes: Sizes, memory: FreeMemory, kind: Kind, reason: str) -> Placement:
    nbytes = sizes.weights if kind == "cpu" else sizes.packed
    return Placement(kind, reason, nbytes, _speed(sizes, memory, kind))


def _fitting(sizes: Sizes, memory: FreeMemory) -> list[Kind]:
    found: list[Kind] = []
    if memory.gpu and sizes.needed("gpu") <= FREE * memory.vram:
        found.append("gpu")
    if memory.gpu and sizes.needed("streamed") <= FREE * memory.vram and sizes.packed <= FREE * memory.host:
        found.append("streamed")
    if sizes.needed("cpu") <= FREE * memory.host:
        found.append("cpu")
    return found


def _why(kind: Kind, memory: FreeMemory) -> str:
    if kind == "gpu":
        return f"the model fits the free memory of {memory.gpu}"
    if kind == "cpu" and memory.training:
        return f"{memory.training} trains on this machine"
    if kind == "cpu" and not memory.gpu:
        return memory.no_gpu
    return f"{format_bytes(memory.vram)} is free on {memory.gpu}, too little for the model"


def _free(memory: FreeMemory) -> str:
    on_gpu = f"{format_bytes(memory.vram)} is free on {memory.gpu} and " if memory.gpu else ""
    return f"{on_gpu}{format_bytes(memory.host)} of host memory is free"


def _needs(sizes: Sizes) -> str:
    return (
        f"the model takes {format_bytes(sizes.weights)}, and keys and values of up to {sizes.longest:,} tokens in "
        f"{counted(sizes.sequences, 'sequence')} {format_bytes(sizes.cache)}"
    )


def _speed(sizes: Sizes, memory: FreeMemory, kind: Kind) -> float:
    """Tokens per second if each of them reads its weights once. Blocks are streamed while others compute."""
    if kind == "cpu":
        return 1 / (sizes.read / (CPU_TRAFFIC * memory.host_rate) + sizes.layers * CPU_LAYER)
    packed = sizes.read * sizes.packed / sizes.weights
    each = GPU_LAYER + (QUANTIZED_LAYER if sizes.packed < sizes.weights else 0.0)
    seconds = packed / (TRAFFIC * memory.vram_rate) + sizes.layers * each
    return 1 / (max(seconds, sizes.blocks / memory.link_rate) if kind == "streamed" else seconds)


def _read(spec: ModelSpec, index: int) -> float:
    """The parameters of a layer that a token reads: of experts, those that it is routed to."""
    products = blocks(spec)[index].expert_products if index < len(spec.layers) else ()
    shares = {product.name: product.active / product.experts for product in products}
    params = (param for unit in spec.stack[index].units for param in spec.units[unit].params)
    return sum((shares.get(param.name, 1.0) * prod(param.shape) for param in params), 0.0)
