"""How much data a run trains on: counted where the data was read whole, and otherwise estimated from its first rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from rptrain.config.schema import Config
from rptrain.data import notes
from rptrain.data.excerpt import Excerpt
from rptrain.data.loader import RANDOM_ROWS, drawn
from rptrain.data.pieces import Pieces, Unsupervised, piece
from rptrain.data.repeats import Repeats
from rptrain.data.sequences import Group, groups_of, supervised_pieces
from rptrain.data.split import divided, selected
from rptrain.data.tokens import Stream

LAID_OUT = 300_000  # most samples that are laid out in sequences to count those


@dataclass(frozen=True)
class Amount:
    """The samples of the training sets and the sequences of an epoch. `exact`: counted, not estimated.

    `longest`: the tokens of the longest sample of what was read, before it is made to fit; 0 without samples.
    """

    samples: int
    sequences: int
    filled: float  # fraction of the sequences that is not padding
    steps_per_epoch: int
    exact: bool
    longest: int = 0


def amount_of(config: Config, excerpts: Sequence[Excerpt]) -> Amount | None:
    """The amount of the training sets, of which these are excerpts; None if it is unknown.

    Raises UserError if training would refuse what was read: if a sample is too long, if no token is supervised, or if
    nothing would be left to train on or to validate with.
    """
    streams = _streams(excerpts)
    if streams and not is_supervised(config, excerpts):
        return None
    if any(excerpt.share is None for excerpt in excerpts):
        return None
    exact = all(excerpt.whole for excerpt in excerpts) and sum(map(len, streams)) <= LAID_OUT
    counts = _counted(config, excerpts) if exact else _estimated(config, excerpts)
    samples, tokens = map(sum, zip(*(_size(config, excerpt) for excerpt in excerpts), strict=True))
    filled = min(1.0, tokens / (sum(counts.values()) * config.data.max_length))
    groups, first = list[Group](), 0
    for weight, count in counts.items():
        groups.append(Group(first, count, weight))
        first += count
    if size := config.data.val_size:
        if exact:
            groups = selected(groups, divided(groups, size, config.train.seed)[0])
        else:
            left = max(0.0, 1 - (size if size < 1 else size / first))
            groups = [Group(0, max(1, round(left * group.count)), group.weight) for group in groups]
    sequences = sum(map(drawn, groups))
    steps = -(-sequences // config.train.global_batch_size)
    longest = max((int(stream.lengths.max(initial=0)) for stream in streams), default=0)
    return Amount(round(samples), sequences, filled, steps, exact, longest)


def is_supervised(config: Config, excerpts: Sequence[Excerpt]) -> bool:
    """Whether a token of these sets, in all of them together as in training, is known to be supervised; others may be
    in rows that were not read. Raises UserError if all rows were read and no token is supervised.
    """
    pieces = _pieces(config, _streams(excerpts))
    if not pieces.supervised.any() and not all(excerpt.whole for excerpt in excerpts):
        return False
    supervised_pieces(pieces)
    return True


def warnings_of(config: Config, excerpts: Sequence[Excerpt]) -> Iterator[str]:
    """Warnings about samples of these sets that are left out or repeat others. Raises as `amount_of`."""
    if not (streams := _streams(excerpts)):
        return
    whole = all(excerpt.whole for excerpt in excerpts)
    yield from notes.sentences(sum((excerpt.tally.notes for excerpt in excerpts), Counter[str]()))
    unsupervised = Unsupervised.of(streams, _pieces(config, streams))
    if unsupervised.count:
        yield unsupervised.sentence(whole)
    repeats = Repeats.of(streams)
    if repeats.many:
        yield repeats.sentence(whole, config.data.val_size > 0)


def _streams(excerpts: Sequence[Excerpt]) -> list[Stream]:
    return [part.stream for excerpt in excerpts for part in excerpt.parts]


def _pieces(config: Config, streams: Sequence[Stream]) -> Pieces:
    return piece(streams, config.data.max_length, config.data.overlong)


def _counted(config: Config, excerpts: Sequence[Excerpt]) -> dict[float, int]:
    """The sequences of all sets by weight, in the order of training."""
    counts = dict.fromkeys((excerpt.source.weight for excerpt in excerpts), 0)
    for excerpt in excerpts:
        counts[excerpt.source.weight] += RANDOM_ROWS if excerpt.random else 0
    if streams := _streams(excerpts):
        weights = [excerpt.source.weight for excerpt in excerpts for _ in excerpt.parts]
        pieces, packing = _pieces(config, streams), config.data.packing
        for group in groups_of(streams, pieces, packing=packing, seed=config.train.seed, weights=weights):
            counts[group.weight] += group.count
    return {weight: count for weight, count in counts.items() if count}


def _estimated(config: Config, excerpts: Sequence[Excerpt]) -> dict[float, int]:
    """As `_counted`, with a set for what its excerpt has of it."""
    counts: dict[float, float] = {}
    for excerpt in excerpts:
        count = float(RANDOM_ROWS)
        if excerpt.parts:
            pieces = _pieces(config, _streams([excerpt]))
            useful = pieces.lengths[pieces.supervised > 0]
            packed = useful.sum(dtype=np.int64) / config.data.max_length if config.data.packing else len(useful)
            count = packed / (excerpt.share or 1)
        counts[excerpt.source.weight] = counts.get(excerpt.source.weight, 0) + count
    return {weight: max(1, ceil(count)) for weight, count in counts.items()}


def _size(config: Config, excerpt: Excerpt) -> tuple[float, float]:
    """The samples of a set, and their tokens that are trained on."""
    if excerpt.random:
        return RANDOM_ROWS, RANDOM_ROWS * config.data.max_length
    pieces, share = _pieces(config, _streams([excerpt])), excerpt.share or 1
    tokens = int(pieces.lengths[pieces.supervised > 0].sum(dtype=np.int64))
    return pieces.trimmed.samples / share, tokens / share
