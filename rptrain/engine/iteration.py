"""What travels through the engine's queues: an iteration's inputs, and the handles of its results."""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log2
from typing import Any

import torch
from torch import Tensor

from rptrain.engine.devices.base import Event
from rptrain.kernels.batch import Batch


@dataclass(frozen=True)
class Iteration:
    """One call of `forward_backward`; `number` counts from 0 since the engine was opened."""

    number: int
    input_ids: Tensor  # int64 [M, T]
    positions: Tensor  # int64 [M, T]
    labels: Tensor  # int64 [M, T]
    cu_seqlens: Tensor  # int32 [M, T + 1]; behind the first len(documents[m]) + 1 entries all are T
    samples: Tensor  # int64 [M, 3]: seed, step and the number of the micro-batch's first row in the step
    documents: tuple[tuple[int, ...], ...]
    sequences: int
    length: int
    supervised: int
    losses: Tensor  # [M], sums over each micro-batch, written by the fused stage's device
    losses_sent: list[Event]  # one for each round that was issued

    @property
    def scale(self) -> float:
        """What losses are multiplied by on the device, beside the LossScale: a power of two, so nothing is rounded."""
        return 2.0 ** -floor(log2(max(self.supervised, 1)))

    @property
    def rest(self) -> float:
        """What is left of 1 / supervised; the optimizer applies it together with the LossScale and clipping."""
        return 1.0 / (self.scale * max(self.supervised, 1))


@dataclass(frozen=True)
class Evaluation:
    """A batch of which only the loss is wanted, with the newest weights; nothing else is under way."""

    iteration: Iteration  # of the next one's number
    number: int  # counts from 0


def iteration_bytes(micro_batches: int, tokens: int) -> int:
    """Bytes of host memory that the index tensors of an iteration take."""
    return micro_batches * (tokens * 3 * 8 + (tokens + 1) * 4 + 3 * 8)


def make_iteration(number: int, batch: Batch, dtype: torch.dtype, *, pin: bool) -> Iteration:
    """A batch with its index tensors where devices can read them: page-locked for CUDA."""
    micro_batches, tokens = batch.input_ids.shape
    cu_seqlens = torch.full((micro_batches, tokens + 1), tokens, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    for m, lengths in enumerate(batch.documents):
        cu_seqlens[m, 1 : len(lengths) + 1] = torch.tensor(lengths).cumsum(0)
    seed = batch.seed & (2**63 - 1)  # it may be of any size
    samples = torch.tensor([[seed, batch.step, m * batch.sequences] for m in range(micro_batches)])
    losses = torch.zeros(micro_batches, dtype=dtype)

    def place(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if pin else tensor

    return Iteration(
        number,
        batch.input_ids,
        place(batch.positions),
        place(batch.labels),
        place(cu_seqlens),
        place(samples),
        batch.documents,
        batch.sequences,
        batch.length,
        batch.supervised,
        place(losses),
        [],
    )


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did. `grad_norm` is before clipping; a step with non-finite gradients is skipped."""

    grad_norm: float
    skipped: bool
    loss_scale: float  # that its loss was multiplied by


@dataclass
class StepRequest:
    """One call of `step`; `result` is there once the step was published."""

    learning_rate: float
    result: StepResult | None = None


class Pending:
    """A result that is still being computed; `result()` waits for it and raises what went wrong."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    def result(self) -> Any:
        return self._wait()


class PendingLoss(Pending):
    """The mean loss of an iteration over its supervised tokens, a float."""

    def __init__(self, wait: Callable[[], float], losses: Tensor) -> None:
        super().__init__(wait)
        self._losses = losses

    def not_finite(self) -> list[int]:
        """The micro-batches whose loss is NaN or infinite; call it after `result`."""
        return (~torch.isfinite(self._losses)).nonzero().flatten().tolist()
