"""The token stream of a data file: consecutive documents, in memory or mapped from the cache."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rptrain.data.formats import Tally
from rptrain.data.probe import panics
from rptrain.utils.liveness import progressed

TOKENS = {"tokens": np.int32, "lengths": np.int32, "supervised": np.int32, "lines": np.int32, "divisible": np.bool_}
PIECE = 1 << 20  # tokens that are written at once


@dataclass(frozen=True)
class Document:
    """The tokens of a sample."""

    line: int  # of its file
    ids: np.ndarray  # int32 [tokens]
    supervised: np.ndarray  # bool [tokens]: whether the loss counts the token
    divisible: bool = False  # a text, any part of which is a sample


@dataclass(frozen=True)
class Origin:
    """What the tokens of a file were made of, and where they are cached."""

    file: Path
    format: str  # TrainSet.format
    tokenizer: Any
    template: str | None  # the text of the chat template
    assistant_only_loss: bool
    tally: Tally  # of the file's rows
    folder: Path  # of the cache


@dataclass(frozen=True)
class Stream:
    """The documents of a file. The arrays are those of TOKENS."""

    tokens: np.ndarray  # [tokens], ids; ~id, which is negative, if the loss counts the token
    lengths: np.ndarray  # [documents]
    supervised: np.ndarray  # [documents], labels that the loss counts; the first token is not a label
    lines: np.ndarray  # [documents], lines in the file
    divisible: np.ndarray  # [documents], whether any part of the document is a sample
    largest: int  # largest token id; -1 without tokens
    digest: str  # of the arrays, by which runs recognize their data: equal in every version of rptrain
    name: str = ""  # the file's
    origin: Origin | None = None  # of a stream from the cache

    def __len__(self) -> int:
        return len(self.lengths)

    def document_of(self, token: int) -> int:
        """The document to which a token belongs."""
        return int(np.searchsorted(np.cumsum(self.lengths, dtype=np.int64), token, "right"))

    def place(self, document: int) -> str:
        """The place as "file:line"."""
        return f"{self.name}:{self.lines[document]}"


def place_of_document(streams: Sequence[Stream], document: int) -> str:
    """The place, as "file:line", of a document among those of all streams."""
    for stream in streams:
        if document < len(stream):
            return stream.place(document)
        document -= len(stream)
    raise IndexError(document)


def stream_of(streams: Sequence[Stream], token: int) -> tuple[Stream, int]:
    """The stream, and the place in it, of a place in the tokens of all streams."""
    for stream in streams:
        if token < len(stream.tokens):
            return stream, token
        token -= len(stream.tokens)
    raise IndexError(token)


def tokenized(tokenizer: Any, texts: str | list[str], **options: Any) -> Any:
    """The result of a call of the tokenizer. Raises UserError if a regular expression in it takes too many steps."""
    with panics(tokenizer.name_or_path):
        return tokenizer(texts, return_attention_mask=False, verbose=False, **options)


def ids_of(tokenizer: Any, text: str) -> np.ndarray:
    """The tokens of a text without special tokens around it, int32 [tokens]. They have no offsets, which take as much
    memory as everything else.

    The tokenizer must have been called before, without truncation and padding: calls set what applies here. Raises as
    `tokenized`.
    """
    with panics(tokenizer.name_or_path):
        (encoding,) = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoding.ids, np.int32)


class Builder:
    """Collects documents: passes tokens to `write`, and keeps the other arrays, 13 bytes per document."""

    def __init__(self, write: Callable[[bytes], object]):
        self._write = write
        self.count, self.largest = 0, -1
        self._lengths, self._supervised, self._lines = array("i"), array("i"), array("i")
        self._divisible = bytearray()

    def add(self, document: Document) -> None:
        progressed()
        ids = document.ids
        for start in range(0, len(ids), PIECE):
            some, supervised = ids[start : start + PIECE], document.supervised[start : start + PIECE]
            self._write(np.where(supervised, ~some, some).tobytes())
        self.count += len(ids)
        self.largest = max(self.largest, int(ids.max(initial=-1)))
        self._lengths.append(len(ids))
        self._supervised.append(int(document.supervised[1:].sum()))
        self._lines.append(document.line)
        self._divisible.append(document.divisible)

    def index(self) -> dict[str, np.ndarray]:
        """All arrays except the tokens."""
        parts = (self._lengths, self._supervised, self._lines, self._divisible)
        return {name: np.frombuffer(part, TOKENS[name]) for name, part in zip(list(TOKENS)[1:], parts, strict=True)}


def gather(documents: Iterable[Document], name: str) -> Stream:
    """A stream in memory, for small data. Its digest is not that of a file of the cache with the same arrays: no data
    set is sometimes in the cache and sometimes not, and checkpoints of runs on built-in sets keep their hash.
    """
    tokens = bytearray()
    builder = Builder(tokens.extend)
    for document in documents:
        builder.add(document)
    arrays = {"tokens": np.frombuffer(tokens, TOKENS["tokens"]), **builder.index()}
    digest = sha256()
    for part in arrays.values():
        digest.update(part.tobytes())
    return Stream(**arrays, largest=builder.largest, digest=digest.hexdigest(), name=name)
