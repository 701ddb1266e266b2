"""The steps of a run: those in progress, their times, those that are skipped, and those that are trained again."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from statistics import median

import torch

from rptrain.engine.engine import Engine
from rptrain.engine.iteration import Pending, PendingLoss, StepResult
from rptrain.kernels.batch import Batch
from rptrain.kernels.compiling import COMPILED
from rptrain.runs.records.events import Event, LossDiffers, LossesRepeated, LossScale, StepSkipped
from rptrain.runs.view.series import Steps
from rptrain.train.job import Job
from rptrain.utils.errors import TrainingError
from rptrain.utils.phases import Phase
from rptrain.utils.text import counted

STEPS, SECONDS = 4, 5.0  # the speed is an average of at least these
RESTART_ADVICE = "Start a new run (save.resume=never) with a lower optim.learning_rate"
PREVIEW_TOKENS = 16  # of each sequence that is shown with a skipped step


@dataclass
class RunningStep:
    """A step that was submitted to the engine and is not reported yet."""

    step: int  # counts from 1
    batch: Batch
    learning_rate: float
    loss: PendingLoss
    update: Pending
    index: int  # counts from 0 since the engine was opened
    first: Phase | None  # if it is the first of an engine


def step_phase(engine: Engine, index: int, step: int) -> Phase:
    """The phase of a step that was submitted. `index`: its number, from 0, since the engine was opened. The phase of
    the first one counts the kernels that are compiled.
    """
    name = f"running step {step}" if index else "running the first step"
    phase, before = Phase(name, unit="micro-batch", repeats=index > 0), COMPILED.count

    def update() -> None:
        progress = engine.progress(index)
        phase.done, phase.total = progress.done, progress.micro_batches
        phase.share, phase.left = progress.share, progress.left
        if index == 0 and (compiled := COMPILED.count - before):
            phase.name = f"{name}, {counted(compiled, 'kernel')} compiled"

    phase.update = update
    return phase


class Clock:
    """Measures how long training ran, without pauses."""

    def __init__(self) -> None:
        self._seconds = 0.0  # until `running` was entered
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within `running`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """How long training ran so far. Within `running`."""
        return self._seconds + time.perf_counter() - self._since


class Throughput:
    """Tokens per second, by a clock, without the steps in which the run warms up.

    With async updates (`asynchronous`), two short steps may run at once and end one right after the other. So the speed
    is an average of the last STEPS steps or more, and of the last SECONDS seconds or more, as far as so many were
    counted; of fewer, it is an average of pairs.
    """

    def __init__(self, clock: Clock, *, asynchronous: bool = False) -> None:
        self._clock, self._least = clock, 1 + asynchronous
        self._ends = deque([(0.0, 0)])  # seconds and tokens of the steps that count, at the ends of the last ones
        self._lap = 0.0, 0  # the same at the last lap
        self._left_out = 0.0  # seconds of the steps that do not count
        self._tokens = 0  # of all steps

    def finished(self, tokens: int, *, warm_up: bool = False) -> float | None:
        """A step with these tokens has ended. Returns the speed; None until enough steps were counted.

        `warm_up`: it does not count, because kernels were compiled meanwhile, for example.
        """
        self._tokens += tokens
        ends, seconds = self._ends, self._clock.seconds - self._left_out
        if warm_up:
            self._left_out += seconds - ends[-1][0]
            return self._speed()
        ends.append((seconds, ends[-1][1] + tokens))
        while len(ends) > STEPS + 1 and seconds - ends[1][0] >= SECONDS:
            ends.popleft()
        return self._speed()

    def lap(self) -> float | None:
        """The speed, as an average of all steps that were counted since the last lap."""
        before, self._lap = self._lap, self._ends[-1]
        speed = self._speed()
        return speed if speed is None or before >= self._ends[0] else _speed(before, self._lap)

    def average(self) -> float:
        """The tokens per second of all steps so far, with those in which the run has warmed up."""
        return self._tokens / self._clock.seconds

    def _speed(self) -> float | None:
        counted = len(self._ends) - 1
        if counted < self._least:
            return None
        first = counted % self._least if counted < STEPS else 0
        return _speed(self._ends[first], self._ends[-1])


def _speed(start: tuple[float, int], end: tuple[float, int]) -> float:
    return (end[1] - start[1]) / (end[0] - start[0])


class StepTimes:
    """Durations of the last steps. With async updates a step runs while the previous one ends, so a duration is the
    time between the ends of both.

    The first step has none, and neither have the steps before and after an interruption.
    """

    def __init__(self, count: int) -> None:
        self._seconds: deque[float] = deque(maxlen=count)
        self._ended: float | None = None  # the previous step, unless it was interrupted

    def finished(self, *, counts: bool = True) -> float | None:
        """A step has ended. Returns its duration, if it has one. A short step does not count for the median."""
        now, before = time.perf_counter(), self._ended
        self._ended = now
        if before is None:
            return None
        if counts:
            self._seconds.append(now - before)
        return now - before

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Around the end of the step that runs and what follows it before the next step is started."""
        self._ended = None
        try:
            yield
        finally:
            self._ended = None

    @property
    def median(self) -> float | None:
        """None if no step has a duration."""
        return median(self._seconds) if self._seconds else None


class SkippedSteps:
    """Counts the skipped steps of a run, `unreported` ones since the last report. `emit` is called with events."""

    def __init__(self, job: Job, emit: Callable[[Event], None]) -> None:
        self._job, self._emit = job, emit
        self._float16 = job.dtype == torch.float16
        self._in_a_row = self.unreported = 0
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
        self.unreported += 1
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
        if step == self._job.total_steps and not isfinite(loss.result()):
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


class RepeatedSteps:
    """Emits whether the losses of steps after `done` are those in the earlier records: once all of them are, or at the
    first one that differs. Steps without an earlier record do not count.
    """

    def __init__(self, earlier: Steps, done: int, emit: Callable[[Event], None]) -> None:
        first = earlier.since(done)
        self._recorded = dict(zip(earlier.column("step")[first:], earlier.column("loss")[first:], strict=True))
        self._last = max(self._recorded, default=0)
        self._equal: list[int] = []  # steps
        self._emit = emit

    def add(self, step: int, loss: float) -> None:
        """A step was recorded."""
        if not self._recorded:
            return
        if (recorded := self._recorded.get(step)) is not None:
            if recorded != loss and (isfinite(recorded) or isfinite(loss)):
                self._emit(LossDiffers(step, *(value if isfinite(value) else None for value in (loss, recorded))))
                self._recorded.clear()
                return
            self._equal.append(step)
        if step >= self._last:
            self._recorded.clear()
            if self._equal:
                self._emit(LossesRepeated(self._equal[0], self._equal[-1], len(self._equal)))
