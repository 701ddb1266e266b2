"""Rows that are not trained on, their loss at intervals, and the end of a run that no longer gets better."""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from rptrain.data.loader import Batches
from rptrain.data.rows import Rows, shuffled
from rptrain.engine.engine import Engine
from rptrain.errors import UserError


def split(rows: Rows, size: float, seed: int) -> tuple[Rows, Rows]:
    """The rows to train on, and those held out: a share below 1 of them, or so many, drawn by the seed.

    UserError where nothing would be left of either.
    """
    count = round(size * len(rows)) if size < 1 else int(size)
    if not 0 < count < len(rows):
        raise UserError(
            f"data.val_size holds out {count} of {len(rows)} rows: there must be rows to train on, and rows held out"
        )
    order = shuffled(len(rows), seed, 1)
    return select(rows, np.sort(order[count:])), select(rows, np.sort(order[:count]))


def select(rows: Rows, chosen: np.ndarray) -> Rows:
    """Some of the rows, in this order."""
    index = torch.from_numpy(chosen)
    lengths = [rows.documents(row) for row in chosen.tolist()]
    starts = np.cumsum([0, *map(len, lengths)])
    return Rows(
        input_ids=rows.input_ids[index],
        labels=rows.labels[index],
        lengths=torch.tensor([length for row in lengths for length in row], dtype=torch.int32),
        starts=torch.from_numpy(starts),
        supervised=rows.supervised[index],
        pad_id=rows.pad_id,
        content_hash=sha256(rows.content_hash.encode() + chosen.tobytes()).hexdigest(),
    )


def loss(engine: Engine, batches: Batches) -> float:
    """The mean over all supervised tokens of the rows, with the newest weights."""
    total = sum(engine.evaluate(batches.batch(step)) for step in range(batches.steps_per_epoch))
    return total / max(int(batches.rows.supervised.sum()), 1)


@dataclass
class Patience:
    """Counts evaluations in a row that were no better than the best. It is kept in checkpoints."""

    most: int | None  # of them; None: any number
    best: float | None = None
    bad: int = 0

    def follow(self, loss: float) -> bool:
        """Whether the run is to end."""
        if self.best is None or loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.most is not None and self.bad >= self.most
