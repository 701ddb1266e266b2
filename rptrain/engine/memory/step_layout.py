"""The sizes and types of a training step, which plans, memory and engine share."""

from dataclasses import dataclass
from typing import Literal

import torch

from rptrain.engine.memory.moments import Moments
from rptrain.engine.memory.share import Share
from rptrain.models.params import Unit

ReduceDtype = Literal["float32", "bfloat16"]  # "float32": sums are sent as they are


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which devices accumulate gradients, and of `fp32` moments."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class StepLayout:
    """A step of M micro-batches of `sequences` x `length` tokens, in rounds of `round_size`.

    The rounds are divided among `replicas` groups of devices. If several processes train the model, these are the
    micro-batches and groups of one of them, with its `share`.
    """

    sequences: int
    length: int
    micro_batches: int
    round_size: int
    dtype: torch.dtype  # of the weights and activations
    asynchronous: bool  # gradients are from weights one step old
    moments: Moments = "fp32"
    fused: bool = False  # the fused kernels run, which keep no upcast copies
    file_backed: bool = False  # frozen weights stay in the model's files
    half_sums: bool = False  # products of float16 matrices are summed in float16
    replicas: int = 1
    share: Share | None = None
    reduce_dtype: ReduceDtype = "float32"  # in which processes send partial gradients

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length

    @property
    def group_tokens(self) -> int:
        """Tokens of a group in a step."""
        return self.tokens * self.micro_batches // self.replicas

    @property
    def at_once(self) -> int:
        """Micro-batches of a round of all groups."""
        return self.round_size * self.replicas

    @property
    def generations(self) -> int:
        """Versions of the weights that are kept."""
        return 1 + self.asynchronous

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which devices accumulate gradients."""
        return accumulate_dtype(self.dtype)

    @property
    def wide_grad(self) -> bool:
        """Whether gradients are partial sums, of rounds or processes."""
        return self.micro_batches > self.round_size or self.share is not None

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients of units without a type of their own are downloaded."""
        return self.wide if self.wide_grad else self.dtype

    def grad_dtype_of(self, unit: Unit) -> torch.dtype:
        """The dtype in which the gradient of a unit is downloaded."""
        return self.wide if self.wide_grad else unit.dtype_in(self.dtype)

    def width(self, devices: int) -> int:
        """The devices of each group."""
        return max(devices // self.replicas, 1)
