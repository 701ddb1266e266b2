"""Recognize the data of runs that earlier versions began.

Their checkpoints have a content hash of which the digests of streams were the hashes of whole files of the token cache:
of the arrays, of counts of rows, and of the cache key, which covers the code of rptrain/data and the versions of
transformers and tokenizers. The same digests are computed here from the arrays of today, or found in files of the cache
that earlier versions wrote. The formulas are theirs and must stay as they are, whatever the cache does today.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from itertools import islice, product
from typing import Any

import numpy as np

from rptrain.data.sequences import Sequences
from rptrain.data.tokens import Origin, Stream
from rptrain.utils.files import file_sha256, open_regular
from rptrain.utils.parallel import in_parallel
from rptrain.utils.private import open_own

HEADER = 1 << 16  # bytes before the arrays in a file of the cache
PIECE = 1 << 24  # bytes of the arrays per hash
ARRAYS = {"tokens": "I32", "lengths": "I32", "supervised": "I32", "lines": "I32", "divisible": "BOOL"}  # in a file
COMBINED = 64  # combinations of cached files that are tried for each version
FACTS = {"largest", "total", "bad", "first", "key"}  # about rows, in a file of the cache
# The hashes of rptrain/data/*.py in the last versions that saved such hashes, newest first.
CODE = (
    "0a1b3b853b691604568de6f46991e41bb75062c571113b6a0cc0aff062d887b4",
    "ba5d9e810aecbba0b6e7011182c4614a8efb97bc250c763373f3d97a7a908258",
    "3213e328141befb355dd507bca195d28c671f31c95414d0263ffdf0b66bb30d1",
    "50689bfd88d6b2cab6c10ab1dac908098e7fc142a078393b193b2323a89b34e1",
    "2a7cb7a0be48990b68920a0d9686b49c63da6a8fb83ccf9903366037a54f7d0f",
    "522cc1b78e5a666116793f23d3e62c8c542bfef60934eb46f3a1a987dacfe8af",
    "a1ee1abd902d01b1e4f860ea4cb534b842773dca7672654cd208837d0b735e65",
    "e82de3f7776a7bbfdd3ae2ba2be8aed65970c72440bdbf72497e091156d950a0",
    "e528d019d34428bf306e64c8b056ad0d69b23eb2e346b3423958b346333bd40f",
    "947b27a455b7d9fae63fea71c7233d7a5f4ea42316bf30683b234d8d29985722",
)


def is_earlier(meta: Mapping[str, Any]) -> bool:
    """Whether an earlier version wrote a checkpoint with this metadata."""
    return "data_hash" not in meta


def is_content_hash(saved: str | None, sequences: Sequences) -> bool:
    """Whether an earlier version would have given this content hash to these sequences.

    Reads their files and tokens, and the headers of files in the cache.
    """
    files = [None if stream.origin is None else _File(stream, stream.origin) for stream in sequences.streams]
    digests = [stream.digest for stream in sequences.streams]
    return any(sequences.hash_of(earlier) == saved for earlier in _earlier_digests(files, digests))


class _File:
    """The digests that the tokens of a data file had in earlier versions."""

    def __init__(self, stream: Stream, origin: Origin) -> None:
        self._stream, self._origin = stream, origin
        arrays = [np.asarray(getattr(stream, name)) for name in ARRAYS]
        self._header, self._size = dict[str, Any](), 0
        for (name, dtype), array in zip(ARRAYS.items(), arrays, strict=True):
            bounds = [self._size, self._size + array.nbytes]
            self._header[name] = {"dtype": dtype, "shape": [len(array)], "data_offsets": bounds}
            self._size += array.nbytes
        self._pieces = _piece_digests([array.view(np.uint8) for array in arrays], self._size)

    def computed(self, code: str) -> str:
        """The digest in the version with this hash of code, with the installed transformers and tokenizers."""
        origin = self._origin
        settings = [origin.format, code, self._tokenizer, origin.template, origin.assistant_only_loss]
        key = json.dumps([self._content, origin.file.suffix.lower(), settings], sort_keys=True)
        facts = {
            "largest": self._stream.largest,
            "total": origin.tally.total,
            "bad": origin.tally.bad,
            "first": origin.tally.first,
            "key": sha256(key.encode(errors="surrogatepass")).hexdigest(),
        }
        return self._digest(json.dumps(facts))

    @cached_property
    def cached(self) -> list[str]:
        """The digests of the files of earlier versions in the cache that have the same arrays, newest first.

        A file has them if its hash is that of these arrays and of its own facts, so only its header is read.
        """
        found = list[tuple[float, str]]()
        for path in self._origin.folder.glob("*.safetensors"):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError), open_own(path) as file:
                status = os.fstat(file.fileno())
                if status.st_size != HEADER + self._size:
                    continue
                metadata = json.loads(file.read(HEADER)[8:])["__metadata__"]
                is_old = json.loads(metadata["facts"]).keys() == FACTS
                if is_old and self._digest(metadata["facts"]) == metadata["sha256"]:
                    found.append((status.st_mtime, metadata["sha256"]))
        return [digest for _, digest in sorted(found, reverse=True)]

    def _digest(self, facts: str) -> str:
        return sha256(json.dumps([self._header, facts], sort_keys=True).encode() + self._pieces).hexdigest()

    @cached_property
    def _content(self) -> str:
        with open_regular(self._origin.file) as file:
            return file_sha256(file)

    @cached_property
    def _tokenizer(self) -> str:
        import tokenizers
        import transformers

        tokenizer = self._origin.tokenizer
        vocabulary, special = tokenizer.backend_tokenizer.to_str(), str(tokenizer.special_tokens_map)
        parts = (vocabulary, special, transformers.__version__, tokenizers.__version__)
        return sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def _earlier_digests(files: Sequence[_File | None], digests: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The digests that the streams may have had in one version. Those without a file have kept their `digests`."""
    for code in CODE:
        own = zip(files, digests, strict=True)
        found = [[*file.cached, file.computed(code)] if file else [digest] for file, digest in own]
        ages = range(max(map(len, found)))  # one version has usually written all files at about the same time
        alike = [tuple(some[min(age, len(some) - 1)] for some in found) for age in ages]
        yield from dict.fromkeys([*alike, *islice(product(*found), COMBINED)])


def _piece_digests(arrays: Sequence[np.ndarray], size: int) -> bytes:
    """The digests of the pieces of consecutive arrays of bytes, which all cores compute."""
    ends = np.cumsum([len(array) for array in arrays]).tolist()
    starts = range(0, size, PIECE)
    digests = [b""] * len(starts)

    def piece(number: int) -> None:
        digest, start = sha256(), starts[number]
        for array, end in zip(arrays, ends, strict=True):
            begin = end - len(array)
            digest.update(array[max(start - begin, 0) : max(start + PIECE - begin, 0)].data)
        digests[number] = digest.digest()

    in_parallel(piece, range(len(starts)))
    return b"".join(digests)
