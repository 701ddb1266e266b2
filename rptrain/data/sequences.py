"""Documents laid out in sequences of one length."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from rptrain.data.formats import Tally
from rptrain.data.pack import pack
from rptrain.data.pieces import Pieces, Trimmed, Unsupervised
from rptrain.data.tokens import Stream
from rptrain.kernels.batch import IGNORED
from rptrain.utils.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """A range of sequences that are drawn equally often."""

    first: int
    count: int
    weight: float  # times per epoch


@dataclass(frozen=True)
class Sequences:
    """S sequences of L tokens; each document has its own positions, attention and labels.

    The sequences refer to places in the streams; `take` copies the tokens.
    """

    streams: tuple[Stream, ...]
    length: int  # L
    begins: np.ndarray  # int64 [documents], places in the tokens of all streams, sequence by sequence
    lengths: np.ndarray  # int32 [documents]
    starts: np.ndarray  # int64 [S + 1], the first document of each sequence
    supervised: np.ndarray  # int64 [S], labels that are not ignored
    groups: tuple[Group, ...]
    trimmed: Trimmed  # what was done to samples that are longer than L
    unsupervised: Unsupervised  # samples that were left out
    pad_id: int
    content_hash: str  # hash of the tokens, labels and documents
    hash_of: Callable[[Sequence[str]], str]  # the content hash if the streams had these digests
    not_taken: tuple[str, ...] = ()  # files in the sources' folders that were ignored, as sentences
    rows: Tally = field(default_factory=Tally)  # that were read, and the bad ones, which were left out

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def largest(self) -> int:
        """The largest token id."""
        return max(self.pad_id, *(stream.largest for stream in self.streams))

    @property
    def tokens(self) -> int:
        """Tokens of all documents, without padding."""
        return int(self.lengths.sum(dtype=np.int64))

    def documents(self, sequence: int) -> list[int]:
        """The lengths of a sequence's documents in order, padding at its end included; they add up to L."""
        lengths = self.lengths[self.starts[sequence] : self.starts[sequence + 1]].tolist()
        rest = self.length - sum(lengths)
        return [*lengths, rest] if rest else lengths

    def take(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids and shifted labels of these sequences: int64 [len(sequences), L] each."""
        marked = np.full((len(sequences), self.length), self.pad_id, np.int64)
        ends = np.zeros(marked.shape, bool)
        bounds = np.cumsum([0, *(len(stream.tokens) for stream in self.streams)])
        for number, sequence in enumerate(sequences):
            place = 0
            for document in range(self.starts[sequence], self.starts[sequence + 1]):
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
    """Lays pieces out in sequences of the length that they were trimmed to, one per sequence without `packing`.

    Pieces without a supervised label are left out, with a warning. Padding at the end of a sequence is a document of
    its own. `weights` are those of the streams: only documents of one weight share a sequence.
    """
    useful = supervised_pieces(pieces)
    unsupervised = Unsupervised.of(streams, pieces)
    if unsupervised.count:
        log.warning(unsupervised.sentence())
    length = pieces.trimmed.max_length
    order, starts, groups = _layout(streams, pieces, useful, length if packing else None, seed, weights)
    parts = (pieces.begins[order], pieces.lengths[order], starts)

    def hash_of(digests: Sequence[str]) -> str:
        digest = sha256(repr((length, pad_id, groups, list(digests))).encode())
        for part in parts:
            digest.update(part.data)
        return digest.hexdigest()

    made = Sequences(
        streams=tuple(streams),
        length=length,
        begins=parts[0],
        lengths=parts[1],
        starts=parts[2],
        supervised=np.add.reduceat(pieces.supervised[order].astype(np.int64), parts[2][:-1]),
        groups=tuple(groups),
        trimmed=pieces.trimmed,
        unsupervised=unsupervised,
        pad_id=pad_id,
        content_hash=hash_of([stream.digest for stream in streams]),
        hash_of=hash_of,
    )
    log.info("%d samples, %d tokens in %d sequences of %d", len(order), made.tokens, len(made), length)
    return made


class NothingSupervised(UserError):
    """No token of the data is supervised."""


def supervised_pieces(pieces: Pieces) -> np.ndarray:
    """The numbers of the pieces with a supervised label. Raises NothingSupervised if there are none."""
    useful = np.flatnonzero(pieces.supervised)
    if not len(useful):
        raise NothingSupervised(
            "no token of the data is supervised: there is no assistant's turn within data.max_length tokens; "
            "fix the data, raise data.max_length or set data.assistant_only_loss = false"
        )
    return useful


def groups_of(
    streams: Sequence[Stream], pieces: Pieces, *, packing: bool, seed: int = 0, weights: Sequence[float] | None = None
) -> list[Group]:
    """The groups of sequences that `build` makes of these."""
    length = pieces.trimmed.max_length if packing else None
    return _layout(streams, pieces, supervised_pieces(pieces), length, seed, weights)[2]


def _layout(
    streams: Sequence[Stream],
    pieces: Pieces,
    useful: np.ndarray,
    packed: int | None,
    seed: int,
    weights: Sequence[float] | None,
) -> tuple[np.ndarray, np.ndarray, list[Group]]:
    """The order of the documents, the first document of each sequence, and the groups of sequences.

    `useful`: the pieces that are laid out. `packed`: the length of sequences that hold several documents.
    """
    lengths = pieces.lengths
    bounds = np.cumsum([len(stream.tokens) for stream in streams])
    weight_of = np.array([1.0] * len(streams) if weights is None else weights)
    weight = weight_of[np.searchsorted(bounds, pieces.begins[useful], "right")]
    alike = {value: useful[weight == value] for value in dict.fromkeys(weight_of.tolist())}
    chosen, starts, groups = list[np.ndarray](), [np.zeros(1, np.int64)], list[Group]()
    sequences = documents = 0
    for weight, found in alike.items():
        if not len(found):
            continue
        found = found[shuffled(len(found), seed)]
        if packed is not None:
            order, begins = pack(lengths[found], packed)
        else:
            order, begins = np.arange(len(found)), np.arange(len(found) + 1)
        chosen.append(found[order])
        starts.append(begins[1:] + documents)
        groups.append(Group(sequences, len(begins) - 1, weight))
        sequences, documents = sequences + len(begins) - 1, documents + len(found)
    return np.concatenate(chosen), np.concatenate(starts), groups


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of the numbers below `count` that depends on the key: int64 [count].

    It uses the raw stream of a bit generator, which numpy keeps stable, unlike its permutations.
    """
    return np.argsort(np.random.PCG64(key).random_raw(count), kind="stable")
