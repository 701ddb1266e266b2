"""Documents laid out in rows of one length."""

import logging
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from rptrain.data.batch import IGNORED
from rptrain.data.packing import Documents, pack
from rptrain.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """R rows of L tokens; each document has positions, attention and labels of its own."""

    input_ids: Tensor  # int32 [R, L]
    labels: Tensor  # int32 [R, L], already shifted
    lengths: Tensor  # int32 [documents], padding at a row's end included
    starts: Tensor  # int64 [R + 1], the first document of each row
    supervised: Tensor  # int64 [R], labels that are not ignored
    pad_id: int
    content_hash: str  # of the tokens, labels and documents

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    def documents(self, row: int) -> list[int]:
        """The lengths of a row's documents, in order; they add up to L."""
        return self.lengths[self.starts[row] : self.starts[row + 1]].tolist()


def build(documents: Documents, *, packing: bool, pad_id: int, seed: int = 0) -> Rows:
    """Lays documents out in rows of `documents.max_length` tokens, one in each without `packing`.

    Those without a supervised label teach nothing and are left out, with a warning. Padding at a row's end is
    a document of its own.
    """
    ids, labels, lengths = documents.ids, documents.labels, documents.lengths
    begins = np.cumsum(lengths) - lengths
    useful = np.flatnonzero(np.logical_or.reduceat(labels != IGNORED, begins) if len(lengths) else lengths)
    if not len(useful):
        raise UserError(
            "no token of the data is supervised: there is no assistant's turn within data.max_length tokens; "
            "mend the data, raise data.max_length or set data.assistant_only_loss = false"
        )
    if len(useful) < len(lengths):
        log.warning("%d documents without a supervised token are left out", len(lengths) - len(useful))
    useful = useful[shuffled(len(useful), seed)]
    length = documents.max_length
    chosen = pack(lengths[useful], length) if packing else [[index] for index in range(len(useful))]
    rows = [useful[row].tolist() for row in chosen]

    row_ids = np.full((len(rows), length), pad_id, dtype=np.int32)
    row_labels = np.full((len(rows), length), IGNORED, dtype=np.int32)
    row_lengths: list[int] = []
    starts = [0]
    for number, row in enumerate(rows):
        place = 0
        for document in row:
            begin, size = begins[document], lengths[document]
            row_ids[number, place : place + size] = ids[begin : begin + size]
            row_labels[number, place : place + size] = labels[begin : begin + size]
            row_lengths.append(int(size))
            place += size
        if place < length:
            row_lengths.append(int(length - place))
        starts.append(len(row_lengths))
    log.info("%d documents, %d tokens in %d rows of %d", len(useful), lengths[useful].sum(), len(rows), length)

    parts = (row_ids, row_labels, np.array(row_lengths, dtype=np.int32), np.array(starts, dtype=np.int64))
    digest = sha256()
    for part in parts:
        digest.update(part.tobytes())
    tensors = [torch.from_numpy(part) for part in parts]
    return Rows(
        input_ids=tensors[0],
        labels=tensors[1],
        lengths=tensors[2],
        starts=tensors[3],
        supervised=(tensors[1] != IGNORED).sum(dim=1),
        pad_id=pad_id,
        content_hash=digest.hexdigest(),
    )


def shuffled(count: int, *key: int) -> np.ndarray:
    """The numbers below `count` in an order that follows from the key: int64 [count].

    numpy promises the raw stream of a bit generator for good, its permutations not.
    """
    return np.argsort(np.random.PCG64(key).random_raw(count), kind="stable")
