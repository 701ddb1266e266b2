"""Documents of tokens, and which of them share a row."""

import logging
from array import array
from collections.abc import Sequence

import numpy as np

from rptrain.data.batch import IGNORED

log = logging.getLogger(__name__)


class Documents:
    """Token ids and supervised marks of many documents, one after another, of at most `max_length` tokens."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self.cut = 0  # conversations that lost their end
        self.divided = 0  # texts that became several documents
        self._ids, self._lengths = array("i"), array("q")
        self._supervised = bytearray()

    def add(self, ids: Sequence[int], supervised: Sequence[bool], *, divisible: bool = False) -> None:
        """A document that is too long becomes several if it is divisible, else it loses its end; counted."""
        if len(ids) > self.max_length:
            if divisible:
                self.divided += 1
            else:
                self.cut += 1
                ids, supervised = ids[: self.max_length], supervised[: self.max_length]
        self._ids.extend(ids)
        self._supervised.extend(supervised)
        whole, rest = divmod(len(ids), self.max_length)
        self._lengths.extend([self.max_length] * whole + [rest] * (rest > 0))

    def warn(self) -> None:
        if self.cut:
            log.warning("%d conversations lost their end: longer than %d tokens", self.cut, self.max_length)
        if self.divided:
            log.warning("%d texts were divided: longer than %d tokens", self.divided, self.max_length)

    @property
    def ids(self) -> np.ndarray:
        """int32 [tokens]"""
        return np.array(self._ids, dtype=np.int32)

    @property
    def supervised(self) -> np.ndarray:
        """bool [tokens]"""
        return np.frombuffer(bytes(self._supervised), dtype=bool)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]"""
        return np.array(self._lengths, dtype=np.int64)

    @property
    def labels(self) -> np.ndarray:
        """int32 [tokens]: the next token of the same document where it is supervised, else IGNORED."""
        ids, supervised = self.ids, self.supervised
        labels = np.full_like(ids, IGNORED)
        labels[:-1] = np.where(supervised[1:], ids[1:], IGNORED)
        labels[np.cumsum(self.lengths) - 1] = IGNORED
        return labels


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Rows of documents whose lengths add up to at most `capacity`, by best-fit decreasing.

    Each document, the longest first, goes to the fullest row that has room for it (Ding et al., "Fewer
    Truncations Improve Language Modeling", 2024, section 3). Rows lie in one bucket for each remaining room,
    and the bits of an integer tell which buckets are not empty, so finding a row takes no search.
    """
    rows: list[list[int]] = []
    buckets: list[list[int]] = [[] for _ in range(capacity)]
    filled = 0  # bit r: some row has room for exactly r more tokens
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fitting = filled >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = buckets[room].pop()
            if not buckets[room]:
                filled ^= 1 << room
        else:
            row, room = len(rows), capacity
            rows.append([])
        rows[row].append(document)
        if room > length:
            buckets[room - length].append(row)
            filled |= 1 << (room - length)
    return rows
