"""Tokenized files on disk, keyed by content, so that what was tokenized once is only mapped into memory.

A file is in the safetensors format, with a header of a fixed size, as it is written last. It is written aside and takes
its name at the end: of two runs that tokenize the same at once either may be the last, and what a run has mapped stays.
"""

import json
import logging
import os
import resource
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from rptrain.checkpoint.atomic_dir import PARTIAL
from rptrain.data.formats import Tally
from rptrain.data.tokens import TOKENS, Builder, Document, Stream
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import in_parallel

log = logging.getLogger(__name__)

HEADER = 1 << 16  # bytes before the arrays
SMALL = 1 << 20  # bytes of arrays that are read: a mapped file is an open one, of which a process may have only so many
PIECE = 1 << 24  # bytes that a thread hashes at a time
ABANDONED = 86400  # seconds after which nobody writes it any more
NAMES = {np.int32: "I32", np.bool_: "BOOL"}


class Damaged(Exception):
    """A file of the cache is not what was written."""


def default_folder() -> Path:
    """Where tokenized files are kept unless `data.cache_dir` says it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rptrain"


def tokenizer_hash(tokenizer: Any) -> str:
    """Of all that decides which tokens a text becomes."""
    import tokenizers
    import transformers

    parts = (
        tokenizer.backend_tokenizer.to_str(),
        str(tokenizer.special_tokens_map),
        transformers.__version__,
        tokenizers.__version__,
    )
    return sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def code_hash() -> str:
    """Of this package, so that no other version's tokens are taken."""
    digest = sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def content_key(file: Path, settings: list[Any]) -> str:
    """What the tokens of a data file are kept under: a hash of its content and of all that its tokens depend on."""
    try:
        with file.open("rb") as source:
            content = file_digest(source, "sha256").hexdigest()
    except (OSError, ValueError) as error:  # a name that cannot be, as with a null character, is a ValueError
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    suffix = file.suffix.lower()  # decides how the file is read
    return sha256(json.dumps([content, suffix, settings], sort_keys=True).encode(errors="surrogatepass")).hexdigest()


def allow_open(files: int) -> None:
    """Lets the process have so many more files open, as far as it may: those that are mapped are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files > soft // 2 and soft != hard:
        most = soft + files if hard == resource.RLIM_INFINITY else min(soft + files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def load(folder: Path, key: str) -> tuple[Stream, Tally] | None:
    """What is kept under a key. None: nothing, or it was damaged, which a warning says."""
    path = _path(folder, key)
    try:
        return _read(path, key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (Damaged, OSError, RecursionError) as error:
        log.warning("%s is damaged (%s): tokenizing the data again", path, error)
        return None


def store(folder: Path, key: str, documents: Iterable[Document], tally: Tally) -> Stream:
    """Writes documents as they come; `tally` is complete after the last. UserError: there is no room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        with NamedTemporaryFile(dir=folder, prefix=f".{key}-", suffix=PARTIAL, delete=False) as file:
            try:
                file.write(bytes(HEADER))
                builder = Builder(file.write)
                for document in documents:
                    builder.add(document)
                arrays, place = {}, 4 * builder.count
                arrays["tokens"] = _entry("tokens", builder.count, 0, place)
                for name, part in builder.index().items():
                    file.write(part.tobytes())
                    arrays[name] = _entry(name, len(part), place, place + part.nbytes)
                    place += part.nbytes
                file.flush()
                facts = {
                    "largest": builder.largest,
                    "total": tally.total,
                    "bad": tally.bad,
                    "first": tally.first,
                    "key": key,
                }
                metadata = {"facts": json.dumps(facts)}
                metadata["sha256"] = _hash(file.fileno(), place, arrays, metadata["facts"])
                header = json.dumps({"__metadata__": metadata, **arrays}).encode().ljust(HEADER - 8)
                file.seek(0)
                file.write((HEADER - 8).to_bytes(8, "little") + header)
                file.flush()
                os.fsync(file.fileno())
                path = _path(folder, key)
                os.replace(file.name, path)
            finally:  # it is there still if it was not finished
                with suppress(FileNotFoundError):
                    os.unlink(file.name)
        return _read(path, key)[0]
    except OSError as error:
        raise UserError(
            f"{folder}: the token cache cannot be written: {error.strerror or error}; make room, or set data.cache_dir"
        ) from error


def _path(folder: Path, key: str) -> Path:
    """Where it is kept: beside another user's file, which only that user can read, under a name with our number."""
    path = folder / f"{key}.safetensors"
    if os.path.exists(path) and not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        return folder / f"{key}-{os.geteuid()}.safetensors"
    return path


def _read(path: Path, key: str) -> tuple[Stream, Tally]:
    if path.exists() and not path.is_file():
        raise Damaged("it is not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - HEADER
        try:
            header = json.loads(file.read(HEADER)[8:])
            metadata = header.pop("__metadata__")
            facts = json.loads(metadata["facts"])
            bounds = {name: header[name]["data_offsets"] for name in TOKENS}
            whole = bounds["divisible"][1] == size
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise Damaged("its header is unreadable") from error
        if not whole:
            raise Damaged(f"it has {size} bytes of arrays")
        if _hash(file.fileno(), size, header, metadata["facts"]) != metadata.get("sha256"):
            raise Damaged("its sha256 differs")
    if facts.get("key") != key:
        raise Damaged("it belongs to other data")
    data = np.memmap(path, np.uint8, "r", HEADER) if size > SMALL else np.fromfile(path, np.uint8, offset=HEADER)
    arrays = (data[start:end].view(TOKENS[name]) for name, (start, end) in bounds.items())
    stream = Stream(*arrays, largest=facts["largest"], digest=metadata["sha256"])
    return stream, Tally(facts["total"], facts["bad"], facts["first"])


def _entry(name: str, count: int, start: int, end: int) -> dict[str, Any]:
    return {"dtype": NAMES[TOKENS[name]], "shape": [count], "data_offsets": [start, end]}


def _hash(descriptor: int, size: int, arrays: dict[str, Any], facts: str) -> str:
    """Of the header's content and the arrays, pieces of which are hashed by all cores."""
    starts = range(0, size, PIECE)
    digests = [b""] * len(starts)

    def piece(number: int) -> None:
        start = starts[number]
        digests[number] = sha256(os.pread(descriptor, min(PIECE, size - start), HEADER + start)).digest()

    in_parallel(piece, range(len(starts)))
    return sha256(json.dumps([arrays, facts], sort_keys=True).encode() + b"".join(digests)).hexdigest()


def _clean(folder: Path) -> None:
    """Of what runs that were killed have left."""
    for file in folder.glob(f".*{PARTIAL}"):
        with suppress(FileNotFoundError, PermissionError):  # the latter: another user's
            if file.is_file() and time.time() - file.stat().st_mtime > ABANDONED:
                file.unlink()
