"""The loss on the validation set, and early stopping once it no longer improves."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rptrain.data.loader import Batches
from rptrain.engine.engine import Engine
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
