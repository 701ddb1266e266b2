"""Documents laid out in rows of one length."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from rptrain.data.pack import pack
from rptrain.data.pieces import Pieces, Trimmed
from rptrain.data.tokens import Stream
from rptrain.kernels.batch import IGNORED
from rptrain.utils.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """Sequences one after another that are taken equally often."""

    first: int
    count: int
    weight: float  # times an epoch


@dataclass(frozen=True)
class Sequences:
    """R rows of L tokens; each document has positions, attention and labels of its own.

    They are places in the streams; the tokens stay there until rows are taken.
    """

    streams: tuple[Stream, ...]
    length: int  # L
    begins: np.ndarray  # int64 [documents], among the tokens of all streams, row by row
    lengths: np.ndarray  # int32 [documents]
    starts: np.ndarray  # int64 [R + 1], the first document of each row
    supervised: np.ndarray  # int64 [R], labels that are not ignored
    groups: tuple[Group, ...]
    trimmed: Trimmed  # what was done to samples that are longer than a row
    unsupervised: int  # samples that were left out, as the loss counts none of their tokens
    pad_id: int
    content_hash: str  # of the tokens, labels and documents
    not_taken: tuple[str, ...] = ()  # files of the sources' folders that are no part of them, in words

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def largest(self) -> int:
        """The largest token id."""
        return max(self.pad_id, *(stream.largest for stream in self.streams))

    @property
    def tokens(self) -> int:
        """Of all documents, without padding."""
        return int(self.lengths.sum(dtype=np.int64))

    def documents(self, row: int) -> list[int]:
        """The lengths of a row's documents, in order, padding at its end included; they add up to L."""
        lengths = self.lengths[self.starts[row] : self.starts[row + 1]].tolist()
        rest = self.length - sum(lengths)
        return [*lengths, rest] if rest else lengths

    def take(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids and labels, already shifted, of these rows: int64 [rows, L] each."""
        marked = np.full((len(rows), self.length), self.pad_id, np.int64)
        ends = np.zeros(marked.shape, bool)
        bounds = np.cumsum([0, *(len(stream.tokens) for stream in self.streams)])
        for number, row in enumerate(rows):
            place = 0
            for document in range(self.starts[row], self.starts[row + 1]):
                begin, length = self.begins[document], int(self.lengths[document])
                stream = int(np.searchsorted(bounds, begin, "right")) - 1
                begin -= bounds[stream]
                marked[number, place : place + length] = self.streams[stream].tokens[begin : begin + length]
                place += length
                ends[number, place - 1] = True
        ids = np.where(marked < 0, ~marked, marked)
        labels = np.full_like(ids, IGNORED)
        labels[:, :-1] = np.where((marked[:, 1:] < 0) & ~ends[:, :-1], ids[:, 1:], IGNORED)
        return torch.from_numpy(ids), torch.from_numpy(labels)


def build(
    streams: Sequence[Stream],
    pieces: Pieces,
    *,
    packing: bool,
    pad_id: int,
    seed: int = 0,
    weights: Sequence[float] | None = None,
) -> Sequences:
    """Lays pieces out in rows of as many tokens as they were trimmed to, one in each without `packing`.

    Those without a supervised label teach nothing and are left out, with a warning. Padding at a row's end is
    a document of its own. `weights` are those of the streams: only documents of one weight share a row.
    """
    useful = np.flatnonzero(pieces.supervised)
    if not len(useful):
        raise UserError(
            "no token of the data is supervised: there is no assistant's turn within data.max_length tokens; "
            "fix the data, raise data.max_length or set data.assistant_only_loss = false"
        )
    if len(useful) < len(pieces.lengths):
        log.warning("%d samples without a supervised token are left out", len(pieces.lengths) - len(useful))
    bounds = np.cumsum([len(stream.tokens) for stream in streams])
    weight_of = np.array([1.0] * len(streams) if weights is None else weights)
    weight = weight_of[np.searchsorted(bounds, pieces.begins[useful], "right")]

    length = pieces.trimmed.max_length
    chosen, starts, groups = [], [np.zeros(1, np.int64)], []
    rows = documents = 0
    for value in dict.fromkeys(weight_of.tolist()):
        alike = useful[weight == value]
        if not len(alike):
            continue
        alike = alike[shuffled(len(alike), seed)]
        if packing:
            order, begins = pack(pieces.lengths[alike], length)
        else:
            order, begins = np.arange(len(alike)), np.arange(len(alike) + 1)
        chosen.append(alike[order])
        starts.append(begins[1:] + documents)
        groups.append(Group(rows, len(begins) - 1, value))
        rows, documents = rows + len(begins) - 1, documents + len(alike)
    order = np.concatenate(chosen)
    parts = (pieces.begins[order], pieces.lengths[order], np.concatenate(starts))
    digest = sha256(repr((length, pad_id, groups, [stream.digest for stream in streams])).encode())
    for part in parts:
        digest.update(part.data)
    made = Sequences(
        streams=tuple(streams),
        length=length,
        begins=parts[0],
        lengths=parts[1],
        starts=parts[2],
        supervised=np.add.reduceat(pieces.supervised[order].astype(np.int64), parts[2][:-1]),
        groups=tuple(groups),
        trimmed=pieces.trimmed,
        unsupervised=len(pieces.lengths) - len(useful),
        pad_id=pad_id,
        content_hash=digest.hexdigest(),
    )
    log.info("%d samples, %d tokens in %d rows of %d", documents, made.tokens, rows, length)
    return made


def shuffled(count: int, *key: int) -> np.ndarray:
    """The numbers below `count` in an order that follows from the key: int64 [count].

    numpy promises the raw stream of a bit generator for good, its permutations not.
    """
    return np.argsort(np.random.PCG64(key).random_raw(count), kind="stable")
