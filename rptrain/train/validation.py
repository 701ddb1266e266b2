"""Rows that are not trained on, their loss at intervals, and the end of a run that no longer gets better."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from rptrain.data.loader import Batches
from rptrain.data.sequences import Group, Rows, shuffled
from rptrain.engine.engine import Engine
from rptrain.utils.errors import UserError


def split(rows: Rows, size: float, seed: int) -> tuple[Rows, Rows]:
    """The rows to train on, and those held out: a share below 1 of them, or so many, drawn by the seed.

    UserError where nothing would be left of either, or nothing to train on of the sets of a weight.
    """
    count = round(size * len(rows)) if size < 1 else int(size)
    if not 0 < count < len(rows):
        raise UserError(
            f"data.val_size holds out {count} of {len(rows)} rows: there must be rows to train on, and rows held out"
        )
    order = shuffled(len(rows), seed, 1)
    trained = select(rows, np.sort(order[count:]))
    for group in rows.groups:
        if group.weight not in {left.weight for left in trained.groups}:
            raise UserError(
                f"data.val_size would hold out all {group.count} rows of the sets with weight {group.weight:g}: lower "
                "it, or give rows to measure as [[data.val]]"
            )
    return trained, once(select(rows, np.sort(order[:count])))


def once(rows: Rows) -> Rows:
    """The rows with each taken once an epoch, whatever its set's weight."""
    return replace(rows, groups=(Group(0, len(rows), 1.0),))


def select(rows: Rows, chosen: np.ndarray) -> Rows:
    """Some of the rows, in ascending order."""
    parts = [slice(rows.starts[row], rows.starts[row + 1]) for row in chosen.tolist()]
    groups: list[Group] = []
    for group in rows.groups:
        first, stop = np.searchsorted(chosen, (group.first, group.first + group.count)).tolist()
        if stop > first:
            groups.append(Group(first, stop - first, group.weight))
    return replace(
        rows,
        begins=np.concatenate([rows.begins[part] for part in parts]),
        lengths=np.concatenate([rows.lengths[part] for part in parts]),
        starts=np.cumsum([0, *(len(rows.lengths[part]) for part in parts)]),
        supervised=rows.supervised[chosen],
        groups=tuple(groups),
        content_hash=sha256(rows.content_hash.encode() + chosen.tobytes()).hexdigest(),
    )


def loss(engine: Engine, batches: Batches, alive: Callable[[], None]) -> float:
    """The mean over all supervised tokens of the rows, with the newest weights; `alive` is called after each batch."""
    total = 0.0
    for step in range(batches.steps_per_epoch):
        total += engine.evaluate(batches.batch(step))
        alive()
    return total / max(int(batches.rows.supervised.sum()), 1)


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
