"""Steps whose gradients are not finite: skipped, counted, told with the rows that did it; many of them end the run."""

import math
from collections.abc import Callable

import torch

from rptrain.engine.iteration import PendingLoss, StepResult
from rptrain.runs.events import Event, LossScale, StepSkipped
from rptrain.train.job import Job
from rptrain.utils.errors import TrainingError

AGAIN = "Begin a new run (save.resume=never) with a lower optim.learning_rate"
SHOWN = 16  # tokens of a row


class SkippedSteps:
    """Follows a run's steps, in order. `tell` is called with records."""

    def __init__(self, job: Job, tell: Callable[[Event], None]) -> None:
        self._job, self._tell = job, tell
        self._half = job.dtype == torch.float16
        self._in_a_row = 0
        self._told_scale: float | None = None  # the last that was told

    def follow(self, step: int, loss: PendingLoss, update: StepResult) -> None:
        """A step, counted from 1, was done. TrainingError where more of them would not mend the model."""
        if self._half and update.loss_scale != self._told_scale:
            self._told_scale = update.loss_scale
            self._tell(LossScale(step, update.loss_scale))
        if not update.skipped:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._tell(self._record(step, loss.not_finite()))
        if self._half:
            if update.loss_scale <= 1:
                raise TrainingError(
                    f"the gradients of step {step} were not finite in float16, and the loss scale would fall below 1: "
                    "the model has numbers that are too large for float16, or has diverged. Begin a new run "
                    '(save.resume=never) with model.dtype="bfloat16", or with a lower optim.learning_rate if the loss '
                    "had begun to rise"
                )
        elif self._in_a_row == self._job.config.optim.max_skipped_steps:
            raise TrainingError(
                f"the gradients of the last {self._in_a_row} steps, up to step {step}, were not finite: the model "
                f"has diverged. {AGAIN}"
            )
        if step == self._job.total_steps and not math.isfinite(loss.result()):
            raise TrainingError(f"the loss of the last step is {loss.result()}: the model has diverged. {AGAIN}")

    def _record(self, step: int, micro_batches: list[int]) -> StepSkipped:
        size, taken = self._job.config.train.sequences, self._job.batches.taken(step - 1).tolist()
        rows = [row for m in micro_batches for row in taken[m * size : (m + 1) * size]]
        tokenizer = self._job.tokenizer
        ids = self._job.sequences.take(rows)[0][:, :SHOWN]
        texts = [] if tokenizer is None else [tokenizer.decode(row) for row in ids]
        return StepSkipped(step, self._in_a_row, tuple(micro_batches), tuple(rows), tuple(texts))
