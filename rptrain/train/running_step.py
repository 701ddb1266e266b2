"""A step in progress, and its phase: how many of its micro-batches are done, and when it will end."""

from dataclasses import dataclass

from rptrain.engine.engine import Engine
from rptrain.engine.iteration import Pending, PendingLoss
from rptrain.kernels.batch import Batch
from rptrain.kernels.compiling import COMPILED
from rptrain.utils.phases import Phase
from rptrain.utils.text import counted


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
