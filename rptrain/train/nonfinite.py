"""Steps with gradients that are not finite: skipped, counted and recorded. Too many of them end the run."""

import math
from collections.abc import Callable

import torch

from rptrain.engine.iteration import PendingLoss, StepResult
from rptrain.runs.records.events import Event, LossScale, StepSkipped
from rptrain.train.job import Job
from rptrain.utils.errors import TrainingError

RESTART_ADVICE = "Start a new run (save.resume=never) with a lower optim.learning_rate"
PREVIEW_TOKENS = 16  # of each sequence


class SkippedSteps:
    """Counts the skipped steps of a run. `emit` is called with events."""

    def __init__(self, job: Job, emit: Callable[[Event], None]) -> None:
        self._job, self._emit = job, emit
        self._float16 = job.dtype == torch.float16
        self._in_a_row = 0
        self._recorded_scale: float | None = None

    def update(self, step: int, loss: PendingLoss, result: StepResult) -> None:
        """Count a finished step; steps count from 1. TrainingError if more steps would not help the model recover."""
        if self._float16 and result.loss_scale != self._recorded_scale:
            self._recorded_scale = result.loss_scale
            self._emit(LossScale(step, result.loss_scale))
        if not result.skipped:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._emit(self._record(step, loss.not_finite()))
        if self._float16:
            if result.loss_scale <= 1:
                raise TrainingError(
                    f"the gradients of step {step} were not finite in float16, and the loss scale would fall below 1: "
                    "the model has values too large for float16, or has diverged. Start a new run (save.resume=never) "
                    'with model.dtype="bfloat16", or with a lower optim.learning_rate if the loss was rising'
                )
        elif self._in_a_row == self._job.config.optim.max_skipped_steps:
            raise TrainingError(
                f"the gradients of the last {self._in_a_row} steps, up to step {step}, were not finite: "
                f"{self._cause(step)}"
            )
        if step == self._job.total_steps and not math.isfinite(loss.result()):
            raise TrainingError(f"the loss of the last step is {loss.result()}: {self._cause(step)}")

    def _cause(self, step: int) -> str:
        if self._in_a_row == step:
            path = self._job.config.model.path
            return f"this was so from step 1 on, before any update. Check the weights in {path} and the data"
        return f"the model has diverged. {RESTART_ADVICE}"

    def _record(self, step: int, micro_batches: list[int]) -> StepSkipped:
        size, taken = self._job.config.train.sequences, self._job.batches.taken(step - 1).tolist()
        indices = [index for m in micro_batches for index in taken[m * size : (m + 1) * size]]
        tokenizer = self._job.tokenizer
        ids = self._job.sequences.take(indices)[0][:, :PREVIEW_TOKENS]
        texts = [] if tokenizer is None else [tokenizer.decode(sequence) for sequence in ids]
        return StepSkipped(step, self._in_a_row, tuple(micro_batches), tuple(indices), tuple(texts))
