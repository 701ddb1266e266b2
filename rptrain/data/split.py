"""Sequences held out of the training set for validation."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np

from rptrain.data.sequences import Group, Sequences, shuffled
from rptrain.utils.errors import UserError


def split(sequences: Sequences, size: float, seed: int) -> tuple[Sequences, Sequences]:
    """Splits off a validation set, drawn by the seed: `size` sequences or, below 1, a fraction of all.

    Raises UserError if either part, or the training part of the sets of one weight, would be empty.
    """
    trained, held_out = divided(sequences.groups, size, seed)
    return select(sequences, trained), once(select(sequences, held_out))


def divided(groups: Sequence[Group], size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the sequences to train on and of those held out, both ascending. Raises as `split`."""
    total = sum(group.count for group in groups)
    count = round(size * total) if size < 1 else int(size)
    if not 0 < count < total:
        raise UserError(
            f"data.val_size holds out {count} of {total} sequences for validation: both sets need at least one sequence"
        )
    order = shuffled(total, seed, 1)
    trained = np.sort(order[count:])
    left = {group.weight for group in selected(groups, trained)}
    for group in groups:
        if group.weight not in left:
            raise UserError(
                f"data.val_size would hold out all {group.count} sequences of the sets with weight {group.weight:g}: "
                "lower it, or name validation data as [[data.val]]"
            )
    return trained, np.sort(order[:count])


def once(sequences: Sequences) -> Sequences:
    """The sequences with weight 1 each."""
    return replace(sequences, groups=(Group(0, len(sequences), 1.0),))


def select(sequences: Sequences, chosen: np.ndarray) -> Sequences:
    """The chosen sequences; `chosen` is ascending."""
    hash_of_all = sequences.hash_of  # keeps the index of all sequences in memory, 12 bytes per document

    def hash_of(digests: Sequence[str]) -> str:
        return _hash_of_chosen(hash_of_all(digests), chosen)

    parts = [slice(sequences.starts[index], sequences.starts[index + 1]) for index in chosen.tolist()]
    return replace(
        sequences,
        begins=np.concatenate([sequences.begins[part] for part in parts]),
        lengths=np.concatenate([sequences.lengths[part] for part in parts]),
        starts=np.cumsum([0, *(len(sequences.lengths[part]) for part in parts)]),
        supervised=sequences.supervised[chosen],
        groups=tuple(selected(sequences.groups, chosen)),
        content_hash=_hash_of_chosen(sequences.content_hash, chosen),
        hash_of=hash_of,
    )


def _hash_of_chosen(content_hash: str, chosen: np.ndarray) -> str:
    return sha256(content_hash.encode() + chosen.tobytes()).hexdigest()


def selected(groups: Sequence[Group], chosen: np.ndarray) -> list[Group]:
    """The groups of the chosen sequences; `chosen` is ascending."""
    found: list[Group] = []
    for group in groups:
        first, stop = np.searchsorted(chosen, (group.first, group.first + group.count)).tolist()
        if stop > first:
            found.append(Group(first, stop - first, group.weight))
    return found
