"""The messages in the engine's queues: the inputs of an iteration, and the handles of its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log2
from typing import Any

import torch
from torch import Tensor

from rptrain.engine.devices.base import Event
from rptrain.engine.memory.page_locking import page_locked
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.kernels.batch import Batch


@dataclass(frozen=True)
class Iteration:
    """One call of `forward_backward`; `number` counts from 0 since the engine was opened."""

    number: int
    input_ids: Tensor  # int64 [M, T]
    positions: Tensor  # int64 [M, T]
    labels: Tensor  # int64 [M, T]
    cu_seqlens: Tensor  # int32 [M, T + 1]; all T after the first len(documents[m]) + 1 entries
    samples: Tensor  # int64 [M, 3]: seed, step and the index of the micro-batch's first sequence in the step
    documents: tuple[tuple[int, ...], ...]
    sequences: int
    length: int
    supervised: int
    losses: Tensor  # sums over each micro-batch, written by the fused stage's device; a short step's end with zeros
    losses_sent: list[Event]  # one per round that was issued
    step_ids: Tensor  # int64, input_ids of all micro-batches of the step, of which other processes may compute some
    numbers: Sequence[int]  # of the micro-batches among them
    step_losses: list[Tensor]  # [full], once other processes have sent theirs
    full: int  # micro-batches of a step of the config, of which a short one has fewer

    @property
    def micro_batches(self) -> int:
        return len(self.input_ids)

    @property
    def scale(self) -> float:
        """The factor of losses on the device besides the LossScale: a power of two, so nothing is rounded."""
        return 2.0 ** -floor(log2(max(self.supervised, 1)))

    @property
    def rest(self) -> float:
        """The remaining factor of 1 / supervised, which the optimizer applies with the LossScale and clipping."""
        return 1.0 / (self.scale * max(self.supervised, 1))


@dataclass(frozen=True)
class Evaluation:
    """A batch whose loss is computed with the newest weights while no iteration is in progress."""

    iteration: Iteration  # has the number of the next one
    number: int  # counts from 0


def iteration_bytes(layout: StepLayout) -> int:
    """Bytes of host memory that the index tensors of an iteration take."""
    tokens = layout.tokens
    return layout.micro_batches * (tokens * 3 * 8 + (tokens + 1) * 4 + 3 * 8)


def make_iteration(
    number: int, batch: Batch, dtype: torch.dtype, *, pin: bool, whole: Batch | None = None
) -> Iteration:
    """An iteration from a batch, with index tensors that devices can read: page-locked for CUDA, as far as possible.

    `whole`: the batch of the step, if `batch` has only some of its micro-batches.
    """
    whole = whole or batch
    micro_batches, tokens = batch.input_ids.shape
    cu_seqlens = torch.full((micro_batches, tokens + 1), tokens, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    for m, lengths in enumerate(batch.documents):
        cu_seqlens[m, 1 : len(lengths) + 1] = torch.tensor(lengths).cumsum(0)
    seed = batch.seed & (2**63 - 1)  # any int is allowed
    numbers = range(micro_batches) if batch.numbers is None else batch.numbers
    samples = torch.tensor([[seed, batch.step, m * batch.sequences] for m in numbers], dtype=torch.int64).view(-1, 3)
    losses = torch.zeros(batch.full or micro_batches, dtype=dtype)

    def place(tensor: Tensor) -> Tensor:
        return page_locked(tensor) if pin and tensor.numel() else tensor

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
        whole.input_ids,
        numbers,
        [],
        whole.full or len(whole.input_ids),
    )


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step. `grad_norm` is the norm before clipping; non-finite gradients skip a step."""

    grad_norm: float
    skipped: bool
    loss_scale: float  # the loss scale of its iteration


@dataclass
class StepRequest:
    """One call of `step`; `result` is set before the step is published."""

    learning_rate: float
    result: StepResult | None = None


class Pending:
    """The handle of a result; `result()` waits for it, and raises an error of the engine."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    def result(self) -> Any:
        return self._wait()


class PendingLoss(Pending):
    """The mean loss of an iteration over its supervised tokens, a float."""

    def __init__(self, wait: Callable[[], Tensor], supervised: int) -> None:
        """`wait` returns the sums of the step's micro-batches."""
        super().__init__(wait)
        self._supervised = supervised

    def result(self) -> float:
        return self._wait().double().sum().item() / max(self._supervised, 1)

    def not_finite(self) -> list[int]:
        """The micro-batches whose loss is NaN or infinite."""
        return (~torch.isfinite(self._wait())).nonzero().flatten().tolist()
