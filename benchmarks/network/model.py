"""A model whose computation is a sleep, its plan, and the time of a step that the planner expects."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rptrain.engine.memory.share import Share
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.meter import Measured
from rptrain.kernels.batch import Batch
from rptrain.machine import hardware
from rptrain.models.families.registry import build
from rptrain.models.spec import ModelSpec
from rptrain.planner.choose import RunPlan, make_plan

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 10,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
WORLD, MICRO_BATCHES, LENGTH = 2, 2, 128  # micro-batches are those of a process


@dataclass(frozen=True)
class Sleeps:
    """Seconds of a pass over a layer, for a micro-batch."""

    forward: float
    backward: float  # without the recomputed forward
    head: float  # forward and backward


@dataclass(frozen=True)
class Sleeping:
    """A layer, or the head, that sleeps in place of computing. Gradients of parameters are zero."""

    layer: Any
    sleeps: Sleeps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def forward(self, p: object, x: Tensor, mb: object) -> Tensor:
        time.sleep(self.sleeps.forward)
        return x.clone()

    def forward_saved(self, p: object, x: Tensor, mb: object) -> tuple[Tensor, None]:
        return self.forward(p, x, mb), None

    def recompute(self, p: object, x: Tensor, mb: object) -> None:
        time.sleep(self.sleeps.forward)

    def backward(self, p: object, g: object, saved: None, dy: Tensor, mb: object) -> Tensor:
        time.sleep(self.sleeps.backward)
        return dy.clone()

    def loss_backward(self, p: object, g: object, x: Tensor, mb: object, scale: float) -> tuple[Tensor, Tensor]:
        time.sleep(self.sleeps.head)
        return torch.ones((), dtype=torch.float32), torch.zeros_like(x)


def sleeping_model(sleeps: Sleeps) -> ModelSpec:
    spec = build(CONFIG)
    layers = tuple(Sleeping(layer, sleeps) for layer in spec.layers)
    return replace(spec, layers=layers, head=Sleeping(spec.head, sleeps))


def batch() -> Batch:
    """A batch of a step for all processes. Its tokens are random."""
    count = WORLD * MICRO_BATCHES
    ids = torch.randint(CONFIG["vocab_size"], (count, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).repeat(count, 1)
    return Batch(ids, positions, ids, ((LENGTH,),) * count, sequences=1, length=LENGTH, supervised=ids.numel())


def planned(sleeps: Sleeps, *, asynchronous: bool, rate: float | None) -> RunPlan:
    """The plan of a process on one CPU worker, with its expected time.

    The times of layers are the sleeps; the rest is what the planner estimates for this machine and for a network of
    `rate` bytes per second, None if messages take no time.
    """
    spec = build(CONFIG)
    layout = StepLayout(
        sequences=1,
        length=LENGTH,
        micro_batches=MICRO_BATCHES,
        round_size=MICRO_BATCHES,
        dtype=torch.bfloat16,
        asynchronous=asynchronous,
        share=Share(WORLD - 1, WORLD, WORLD),
    )
    blocks = len(spec.layers)
    times = Measured(
        forward=(*[sleeps.forward] * blocks, 0.0),
        backward=(*[sleeps.backward] * blocks, sleeps.head),
        upload=None,
        download=None,
        update=0.0,  # unknown: estimated
        steps=0,
    )
    machine = replace(hardware.machine(("cpu:0",)), network=rate)
    return make_plan(spec, machine, layout, measured=times)
