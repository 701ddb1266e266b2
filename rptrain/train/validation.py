"""The loss of the validation set, and the end of a run in which it no longer falls."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rptrain.data.loader import Batches
from rptrain.engine.engine import Engine


def loss(engine: Engine, batches: Batches, alive: Callable[[], None]) -> float:
    """The mean over all supervised tokens of the rows, with the newest weights; `alive` is called after each batch."""
    total = 0.0
    for step in range(batches.steps_per_epoch):
        total += engine.evaluate(batches.batch(step))
        alive()
    return total / max(int(batches.sequences.supervised.sum()), 1)


@dataclass
class Patience:
    """Counts evaluations in a row that were no better than the best. It is kept in checkpoints."""

    most: int | None  # of them; None: any number
    best: float | None = None
    bad: int = 0

    def follow(self, loss: float) -> bool:
        """Whether the run is to end. A loss that is no number is never the best."""
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.over

    @property
    def over(self) -> bool:
        """Whether it has run out."""
        return self.most is not None and self.bad >= self.most
