"""Documents that fit a sequence: longer ones are truncated, split, dropped, or stop the run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np

from rptrain.data.tokens import Stream, place_of_document
from rptrain.utils.errors import UserError
from rptrain.utils.text import counted

log = logging.getLogger(__name__)

SHOWN = 5  # samples that a report names
Overlong = Literal["truncate", "split", "drop", "error"]


@dataclass(frozen=True)
class Trimmed:
    """Counts of samples that are longer than a sequence, by what was done to them."""

    samples: int  # samples of any length
    max_length: int
    cut: int  # truncated samples
    cut_tokens: int
    divided: int  # split samples
    dropped: int  # dropped samples
    dropped_tokens: int

    def warn(self) -> None:
        for line in self.lines():
            log.warning(line)

    def lines(self) -> list[str]:
        """A sentence for each thing that was done."""
        longer = f"longer than {self.max_length:,} tokens"
        lines = []
        if self.cut:
            lost = counted(self.cut_tokens, "token")
            lines.append(f"truncated {counted(self.cut, 'sample')} by {lost} in total: {longer}")
        if self.divided:
            lines.append(f"split {counted(self.divided, 'sample')}: {longer}")
        if self.dropped:
            lost = counted(self.dropped_tokens, "token")
            lines.append(f"left out {counted(self.dropped, 'sample')} with {lost} in total: {longer}")
        return lines


@dataclass(frozen=True)
class Pieces:
    """Samples or parts of samples that fit a sequence, in order. `begins`: places in the tokens of all streams."""

    begins: np.ndarray  # int64 [pieces]
    lengths: np.ndarray  # int32 [pieces]
    supervised: np.ndarray  # int32 [pieces], labels that the loss counts
    documents: np.ndarray  # int64 [pieces], the documents of all streams that they are parts of
    trimmed: Trimmed


@dataclass(frozen=True)
class Unsupervised:
    """Samples, or parts of them, that are left out because the loss counts none of their tokens."""

    count: int
    total: int  # of which these are
    first: tuple[str, ...]  # places of the first of them, as "file:line"

    PROBLEM: ClassVar[str] = "samples have no supervised token"

    @classmethod
    def of(cls, streams: Sequence[Stream], pieces: Pieces) -> Self:
        found = np.flatnonzero(pieces.supervised == 0)
        places = (place_of_document(streams, document) for document in pieces.documents[found[:SHOWN]].tolist())
        return cls(len(found), len(pieces.supervised), tuple(dict.fromkeys(places)))

    def sentence(self, whole: bool = True) -> str:
        """`whole`: whether these are all samples, and not only the first ones."""
        more = f" and {self.count - SHOWN:,} more" if self.count > SHOWN else ""
        return (
            f"{self.count:,} of {'' if whole else 'the first '}{self.total:,} {self.PROBLEM} and are left out: "
            f"{', '.join(self.first)}{more}"
        )


def piece(streams: Sequence[Stream], max_length: int, overlong: Overlong) -> Pieces:
    """The pieces of all documents. `overlong` decides about longer documents; raw texts are always split.

    Raises UserError if a document is longer and `overlong` is "error".
    """
    lengths = np.concatenate([stream.lengths for stream in streams]).astype(np.int64)
    begins = np.cumsum(lengths) - lengths
    divided = np.concatenate([stream.divisible for stream in streams]) | (overlong == "split")
    long = lengths > max_length
    whole = long & ~divided
    if whole.any() and overlong == "error":
        _refuse(streams, np.flatnonzero(whole), max_length)
    counts = np.where(long & divided, -(-lengths // max_length), np.where(whole & (overlong == "drop"), 0, 1))
    document = np.repeat(np.arange(len(lengths)), counts)
    part = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    piece_begins = begins[document] + part * max_length
    piece_lengths = np.minimum(lengths[document] - part * max_length, max_length).astype(np.int32)
    supervised = np.concatenate([stream.supervised for stream in streams])[document]
    first = np.cumsum([0, *(len(stream.tokens) for stream in streams)])
    for index in np.flatnonzero(long[document]).tolist():
        stream = int(np.searchsorted(first, piece_begins[index], "right")) - 1
        start = piece_begins[index] - first[stream]
        supervised[index] = (streams[stream].tokens[start + 1 : start + piece_lengths[index]] < 0).sum()
    cut = whole & (overlong == "truncate")
    dropped = whole & (overlong == "drop")
    trimmed = Trimmed(
        len(lengths),
        max_length,
        cut=int(cut.sum()),
        cut_tokens=int((lengths[cut] - max_length).sum()),
        divided=int((long & divided).sum()),
        dropped=int(dropped.sum()),
        dropped_tokens=int(lengths[dropped].sum()),
    )
    return Pieces(piece_begins, piece_lengths, supervised, document, trimmed)


def _refuse(streams: Sequence[Stream], documents: np.ndarray, max_length: int) -> None:
    bounds = np.cumsum([len(stream) for stream in streams])
    shown = []
    for document in documents[:SHOWN].tolist():
        number = int(np.searchsorted(bounds, document, "right"))
        stream = streams[number]
        inside = document - (int(bounds[number]) - len(stream))
        shown.append(f"{stream.place(inside)}: {stream.lengths[inside]} tokens")
    more = [f"and {len(documents) - len(shown)} more"] if len(documents) > len(shown) else []
    report = "\n  ".join([f"{len(documents)} samples are longer than {max_length} tokens:", *shown, *more])
    raise UserError(f'{report}\nRaise data.max_length, or set data.overlong to "truncate", "split" or "drop".')
