"""Sequences held out of the training set for validation."""

from dataclasses import replace
from hashlib import sha256

import numpy as np

from rptrain.data.sequences import Group, Sequences, shuffled
from rptrain.utils.errors import UserError


def split(rows: Sequences, size: float, seed: int) -> tuple[Sequences, Sequences]:
    """The rows to train on, and those held out: a share below 1 of them, or so many, drawn by the seed.

    UserError where nothing would be left of either, or nothing to train on of the sets of a weight.
    """
    count = round(size * len(rows)) if size < 1 else int(size)
    if not 0 < count < len(rows):
        raise UserError(
            f"data.val_size holds out {count} of {len(rows)} sequences for validation: both sets need at "
            "least one sequence"
        )
    order = shuffled(len(rows), seed, 1)
    trained = select(rows, np.sort(order[count:]))
    for group in rows.groups:
        if group.weight not in {left.weight for left in trained.groups}:
            raise UserError(
                f"data.val_size would hold out all {group.count} sequences of the sets with weight {group.weight:g}: "
                "lower it, or name validation data as [[data.val]]"
            )
    return trained, once(select(rows, np.sort(order[:count])))


def once(rows: Sequences) -> Sequences:
    """The rows with each taken once an epoch, whatever its set's weight."""
    return replace(rows, groups=(Group(0, len(rows), 1.0),))


def select(rows: Sequences, chosen: np.ndarray) -> Sequences:
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
