"""Documents of tokens, one after another: what comes of a data file, in memory or mapped from the cache."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

TOKENS = {"tokens": np.int32, "lengths": np.int32, "supervised": np.int32, "lines": np.int32, "divisible": np.bool_}


@dataclass(frozen=True)
class Document:
    """A sample as tokens."""

    line: int  # of its file
    ids: np.ndarray  # int32 [tokens]
    supervised: np.ndarray  # bool [tokens]: what the loss counts
    divisible: bool = False  # a text, of which any part is a sample


@dataclass(frozen=True)
class Stream:
    """The documents of a file. The arrays are those of TOKENS."""

    tokens: np.ndarray  # [tokens], ids; of those that the loss counts the complement, ~id, which is negative
    lengths: np.ndarray  # [documents]
    supervised: np.ndarray  # [documents], labels that the loss counts: the first token is nobody's label
    lines: np.ndarray  # [documents], where they stand in the file
    divisible: np.ndarray  # [documents], whether any part is a sample
    largest: int  # token id; -1 without any
    digest: str  # of the arrays
    name: str = ""  # the file's

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, document: int) -> str:
        """Where it stands: "file:line"."""
        return f"{self.name}:{self.lines[document]}"


class Builder:
    """Collects documents: tokens leave through `write` as they come, the rest stays here, 13 bytes a document."""

    def __init__(self, write: Callable[[bytes], object]):
        self._write = write
        self.count, self.largest = 0, -1
        self._lengths, self._supervised, self._lines = array("i"), array("i"), array("i")
        self._divisible = bytearray()

    def add(self, document: Document) -> None:
        ids = document.ids
        self._write(np.where(document.supervised, ~ids, ids).tobytes())
        self.count += len(ids)
        self.largest = max(self.largest, int(ids.max(initial=-1)))
        self._lengths.append(len(ids))
        self._supervised.append(int(document.supervised[1:].sum()))
        self._lines.append(document.line)
        self._divisible.append(document.divisible)

    def index(self) -> dict[str, np.ndarray]:
        """All arrays but the tokens."""
        parts = (self._lengths, self._supervised, self._lines, self._divisible)
        return {name: np.frombuffer(part, TOKENS[name]) for name, part in zip(list(TOKENS)[1:], parts, strict=True)}


def gather(documents: Iterable[Document], name: str) -> Stream:
    """A stream in memory, for what is small."""
    tokens = bytearray()
    builder = Builder(tokens.extend)
    for document in documents:
        builder.add(document)
    arrays = {"tokens": np.frombuffer(tokens, TOKENS["tokens"]), **builder.index()}
    digest = sha256()
    for part in arrays.values():
        digest.update(part.tobytes())
    return Stream(**arrays, largest=builder.largest, digest=digest.hexdigest(), name=name)
