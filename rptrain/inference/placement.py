"""Where a model answers, chosen before anything is loaded, with the speed to expect."""

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from rptrain.models.layers.cache import cache_bytes
from rptrain.models.layers.moe import MoEBlock
from rptrain.models.spec import ModelSpec
from rptrain.schedule.machine import LAUNCH, TRAFFIC
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes, format_rate

Kind = Literal["gpu", "cpu"]
KINDS = ("auto", "gpu", "cpu")
FREE = 0.8  # fraction of free memory for weights, keys and values; the rest is for temporaries
TOKENS = 4096  # whose keys and values must fit beside the weights
CPU_LAYER = 0.25e-3  # least seconds of a token in a layer on the CPU: calls of its operations
EXPERTS = ("experts_gate_up", "experts_down")


@dataclass(frozen=True)
class Room:
    """The free memory of this machine in bytes, and rates in bytes per second."""

    host: int
    host_rate: float  # of host memory
    gpu: str = ""  # the name of the first GPU; empty: there is none
    vram: int = 0
    vram_rate: float = 0.0  # of the GPU's own memory
    training: str = ""  # the name of a run that trains on this machine


@dataclass(frozen=True)
class Sizes:
    """What a model takes, in bytes."""

    weights: int
    cache: int  # keys and values of TOKENS tokens
    read: int  # weights that a token reads
    layers: int

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype) -> "Sizes":
        weights = spec.num_parameters * dtype.itemsize
        read = sum(_read(spec, index) for index in range(len(spec.stack))) * dtype.itemsize
        return cls(weights, cache_bytes(spec, 1, TOKENS, dtype), int(read), len(spec.stack))

    @property
    def total(self) -> int:
        return self.weights + self.cache


@dataclass(frozen=True)
class Placement:
    """Where a model answers and why, and the speed to expect."""

    kind: Kind
    reason: str  # a sentence without its end
    nbytes: int  # of weights
    tokens_per_second: float  # expected

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if self.kind == "gpu" else "cpu")

    def __str__(self) -> str:
        where = {"gpu": "on the GPU", "cpu": "on the CPU"}[self.kind]
        return f"{format_bytes(self.nbytes)} {where}, about {format_rate(self.tokens_per_second)} expected"


def choose(sizes: Sizes, room: Room, wanted: str = "auto") -> Placement:
    """The fastest placement with enough free memory; beside a training, the CPU. `wanted`: one of KINDS.

    Raises UserError if the model does not fit.
    """
    if wanted not in KINDS:
        raise UserError(f"unknown placement {wanted!r}: use one of {', '.join(KINDS)}")
    if wanted == "gpu" and not room.gpu:
        raise UserError("this machine has no CUDA GPU: use the placement cpu")
    fits_gpu, fits_host = sizes.total <= FREE * room.vram, sizes.total <= FREE * room.host
    if wanted == "gpu" and not fits_gpu:
        raise UserError(f"{_needs(sizes)}, and {format_bytes(room.vram)} is free on {room.gpu}: use the placement cpu")
    if wanted == "gpu" or (wanted == "auto" and fits_gpu and room.gpu and not room.training):
        reason = "chosen" if wanted == "gpu" else f"the model fits the free memory of {room.gpu}"
        return Placement("gpu", reason, sizes.weights, _speed(sizes, TRAFFIC * room.vram_rate, LAUNCH))
    if not fits_host:
        more = f", or use the placement gpu while {room.training} trains" if room.training and fits_gpu else ""
        raise UserError(f"{_needs(sizes)}, and {format_bytes(room.host)} of host memory is free: free memory{more}")
    return Placement("cpu", _why_cpu(room, wanted), sizes.weights, _speed(sizes, room.host_rate, CPU_LAYER))


def _why_cpu(room: Room, wanted: str) -> str:
    if wanted == "cpu":
        return "chosen"
    if room.training:
        return f"{room.training} trains on this machine"
    if not room.gpu:
        return "this machine has no CUDA GPU"
    return f"{format_bytes(room.vram)} is free on {room.gpu}, too little for the model"


def _needs(sizes: Sizes) -> str:
    return (
        f"the model takes {format_bytes(sizes.weights)}, and keys and values of {TOKENS:,} tokens "
        f"{format_bytes(sizes.cache)}"
    )


def _speed(sizes: Sizes, rate: float, layer_seconds: float) -> float:
    """Tokens per second if every token reads its weights once at a rate in bytes per second."""
    return 1 / (sizes.read / rate + sizes.layers * layer_seconds)


def _read(spec: ModelSpec, index: int) -> float:
    """The parameters of a layer that a token reads: of experts, those that it is routed to."""
    layer = spec.stack[index]
    total = 0.0
    for param in (param for unit in layer.units for param in spec.units[unit].params):
        share = layer.active / layer.experts if isinstance(layer, MoEBlock) and param.name in EXPERTS else 1.0
        total += share * prod(param.shape)
    return total
