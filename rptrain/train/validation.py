"""The loss on the validation set, early stopping once it no longer improves, and the best checkpoint at the end."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rptrain.checkpoint.atomic_dir import Damaged, set_aside
from rptrain.checkpoint.processes import ALONE, Processes
from rptrain.checkpoint.run_states import checkpoints_by_loss
from rptrain.checkpoint.state import load_state
from rptrain.data.loader import Batches
from rptrain.engine.engine import Engine
from rptrain.engine.memory.unit_state import UnitState
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.events import BestLoaded, CheckpointDamaged, Event
from rptrain.utils.phases import phase


def loss(engine: Engine, batches: Batches, heartbeat: Callable[[], None]) -> float:
    """The mean loss per supervised token, with the newest weights. `heartbeat` is called after each batch."""
    total = 0.0
    with phase("evaluating the validation set", batches.steps_per_epoch, unit="") as evaluating:
        for step in range(batches.steps_per_epoch):
            total += engine.evaluate(batches.batch(step))
            heartbeat()
            evaluating.add()
    return total / max(int(batches.sequences.supervised.sum()), 1)


@dataclass
class EarlyStopping:
    """Counts consecutive evaluations without improvement. `best` and `bad` are saved in checkpoints."""

    patience: int | None  # stop after this many of them; None: never
    best: float | None = None
    bad: int = 0

    def update(self, loss: float) -> bool:
        """Count an evaluation; returns whether the run should stop. A loss that is NaN or infinite never improves."""
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.stopped

    @property
    def stopped(self) -> bool:
        return self.patience is not None and self.bad >= self.patience


def load_best(
    run: RunDir,
    units: Sequence[UnitState],
    step: int,
    emit: Callable[[Event], None],
    processes: Processes = ALONE,
) -> tuple[int, float]:
    """Load the checkpoint with the lowest validation loss into the units, which hold the state after `step`.

    Returns its step and its loss. A damaged checkpoint is renamed, and the next best one is used; an event is emitted
    for each. Raises Damaged if no checkpoint is left. If several `processes` train the model, all call this, and load
    the same one.
    """
    current = run.checkpoint_path(step)  # the units hold its state: there is nothing to load
    ranked, *_ = processes.gather([(loss, path.name) for loss, path in checkpoints_by_loss(run.checkpoints_path)])
    for loss, name in ranked:
        path = run.checkpoint_path(step).with_name(name)
        try:
            with processes.together():
                loaded = step if path == current else load_state(path, units)["step"]
        except Damaged as error:
            current = None  # the units may hold parts of the damaged one
            if processes.first:
                set_aside(path)
            emit(CheckpointDamaged(str(path), str(error)))
            continue
        emit(BestLoaded(loaded, str(path), loss))
        return loaded, loss
    raise Damaged(
        f"{run.checkpoints_path} has no undamaged checkpoint with a validation loss: "
        "set save.load_best_model_at_end=false"
    )
