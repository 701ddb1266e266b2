"""A cache of tokenized files, keyed by content, which later runs map into memory.

A file has the safetensors format, with a header of fixed size, which is written last. It is written under a temporary
name and renamed at the end: if two runs tokenize the same file at once, either may be last; mapped files stay valid.
Files that another user can have written are not read, because their hash shows only that they are whole.
"""

import errno
import json
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import numpy as np

from rptrain.data.formats import Tally
from rptrain.data.tokens import TOKENS, Builder, Document, Stream
from rptrain.utils.errors import UserError
from rptrain.utils.files import file_sha256, open_regular
from rptrain.utils.parallel import in_parallel
from rptrain.utils.paths import from_environment, writable_place
from rptrain.utils.private import Untrusted, close_own_folder, make_own_folder, open_own
from rptrain.utils.replacing import PARTIAL

log = logging.getLogger(__name__)

HEADER = 1 << 16  # bytes before the arrays
SMALL = 1 << 20  # bytes of arrays that are read instead of mapped: a process may have only so many open files
PIECE = 1 << 24  # bytes per thread and hash; digests of streams depend on it
ABANDONED = 86400  # seconds after which a temporary file counts as abandoned
UNMAPPED = (errno.ENODEV, errno.EOPNOTSUPP)  # the errors of file systems that map no files, such as some FUSE ones
FULL = (errno.EDQUOT, errno.EFBIG, errno.ENOSPC)  # the errors of a full disk, or of a limit
NAMES = {np.int32: "I32", np.bool_: "BOOL"}


class Damaged(Exception):
    """A file of the cache is damaged."""


def default_folder() -> Path:
    """The default of `data.cache_dir`. Raises UserError if the home directory is unknown."""
    return from_environment("XDG_CACHE_HOME", "~/.cache") / "rptrain"


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of everything that determines the tokens of a text."""
    import tokenizers
    import transformers

    parts = (
        tokenizer.backend_tokenizer.to_str(),
        str(tokenizer.special_tokens_map),
        transformers.__version__,
        tokenizers.__version__,
    )
    return sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def code_hash(*more: Path) -> str:
    """A hash of this package and of more files, so that tokens of other versions are not used."""
    digest = sha256()
    for file in (*sorted(Path(__file__).parent.glob("*.py")), *more):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def content_key(file: Path, settings: list[Any]) -> str:
    """The cache key of a data file: a hash of its content and of everything else that its tokens depend on."""
    try:
        with open_regular(file) as source:
            content = file_sha256(source)
    except UserError:  # a ValueError, too
        raise
    except (OSError, ValueError) as error:  # ValueError: an impossible name, for example with a null character
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    suffix = file.suffix.lower()  # determines how the file is read
    return sha256(json.dumps([content, suffix, settings], sort_keys=True).encode(errors="surrogatepass")).hexdigest()


def allow_open(files: int) -> None:
    """Allows the process to open `files` more files, as far as permitted, because mapped files stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files > soft // 2 and soft != hard:
        most = soft + files if hard == resource.RLIM_INFINITY else min(soft + files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def load(folder: Path, key: str) -> tuple[Stream, Tally] | None:
    """The tokens under a key; None if there are none, or, with a warning, if the file is damaged or another user can
    have written it.
    """
    for path in (_path(folder, key, os.geteuid()), _path(folder, key)):
        try:
            if path.exists() and not path.is_file():
                raise Damaged("it is not a file")
            with open_own(path) as file:
                return _read(file, key)
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # PermissionError: another user's file
            continue
        except Untrusted as error:
            log.warning("%s: tokenizing the data again", error)
        except (Damaged, OSError, RecursionError) as error:
            log.warning("%s is damaged (%s): tokenizing the data again", path, error)
    return None


def check_folder(folder: Path) -> None:
    """UserError if no tokens could be written to a folder, as far as can be told without writing."""
    try:
        writable_place(folder)
    except OSError as error:
        raise _not_written(folder, error) from error


def store(folder: Path, key: str, documents: Iterable[Document], tally: Tally) -> Stream:
    """Writes documents as they arrive; `tally` is complete after the last. Raises UserError if that fails."""
    try:
        writable_place(folder)
        if _is_default(folder):
            close_own_folder(folder.resolve())  # which may be a link to another disk
        else:
            make_own_folder(folder)  # that of data.cache_dir may be shared
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
                    "notes": tally.notes,
                    "ends": tally.ends,
                    "key": key,
                }
                metadata = {"facts": json.dumps(facts)}
                metadata["sha256"] = _hash([arrays, metadata["facts"]], _piece_digests(file.fileno(), place))
                header = json.dumps({"__metadata__": metadata, **arrays}).encode().ljust(HEADER - 8)
                file.seek(0)
                file.write((HEADER - 8).to_bytes(8, "little") + header)
                file.flush()
                os.fsync(file.fileno())
                stream = _read(file, key)[0]
                os.replace(file.name, _free_path(folder, key))
            finally:  # still exists if it was not finished
                with suppress(FileNotFoundError):
                    os.unlink(file.name)
        return stream
    except OSError as error:
        raise _not_written(folder, error) from error


def _is_default(folder: Path) -> bool:
    with suppress(UserError):  # an unknown home directory
        return folder == default_folder()
    return False


def _not_written(folder: Path, error: OSError) -> UserError:
    advice = "set data.cache_dir to another folder"
    if error.errno in FULL:
        advice = (
            "free disk space (its *.safetensors files may be deleted while no run uses them), or set data.cache_dir to "
            "a folder on another disk"
        )
    return UserError(f"{folder}: the token cache cannot be written: {error.strerror or error}; {advice}")


def _path(folder: Path, key: str, user: int | None = None) -> Path:
    """The path of the file; with a `user` the one for a user id, where another user's file has that name."""
    return folder / f"{key}{'' if user is None else f'-{user}'}.safetensors"


def _free_path(folder: Path, key: str) -> Path:
    """The path to write to."""
    path = _path(folder, key)
    with suppress(FileNotFoundError):
        if path.lstat().st_uid != os.geteuid():
            return _path(folder, key, os.geteuid())
    return path


def _read(file: IO[bytes], key: str) -> tuple[Stream, Tally]:
    file.seek(0)
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
    pieces = _piece_digests(file.fileno(), size)
    if _hash([header, metadata["facts"]], pieces) != metadata.get("sha256"):
        raise Damaged("its sha256 differs")
    if facts.get("key") != key:
        raise Damaged("it belongs to other data")
    file.seek(0)
    data = _data(file, size)
    arrays = (data[start:end].view(TOKENS[name]) for name, (start, end) in bounds.items())
    stream = Stream(*arrays, largest=facts["largest"], digest=_hash(header, pieces))
    ends = Counter({int(token): rows for token, rows in facts["ends"].items()})
    return stream, Tally(facts["total"], facts["bad"], facts["first"], notes=Counter(facts["notes"]), ends=ends)


def _data(file: IO[bytes], size: int) -> np.ndarray:
    """The bytes behind the header: mapped if there are many and the file system can do that, otherwise read."""
    if size > SMALL:
        try:
            return np.memmap(file, np.uint8, "r", HEADER)
        except OSError as error:
            if error.errno not in UNMAPPED:
                raise
            file.seek(0)
    return np.fromfile(file, np.uint8, offset=HEADER)


def _entry(name: str, count: int, start: int, end: int) -> dict[str, Any]:
    return {"dtype": NAMES[TOKENS[name]], "shape": [count], "data_offsets": [start, end]}


def _piece_digests(descriptor: int, size: int) -> bytes:
    """The digests of the pieces of a file's arrays, which all cores compute."""
    starts = range(0, size, PIECE)
    digests = [b""] * len(starts)

    def piece(number: int) -> None:
        start = starts[number]
        digests[number] = sha256(os.pread(descriptor, min(PIECE, size - start), HEADER + start)).digest()

    in_parallel(piece, range(len(starts)))
    return b"".join(digests)


def _hash(header: Any, pieces: bytes) -> str:
    """A hash of arrays, whose pieces have these digests, and of a part of the header that has their sizes.

    Without the facts about rows and the key, it is the digest of the stream, which must not change.
    """
    return sha256(json.dumps(header, sort_keys=True).encode() + pieces).hexdigest()


def _clean(folder: Path) -> None:
    """Deletes files that killed runs have left."""
    for file in folder.glob(f".*{PARTIAL}"):
        with suppress(FileNotFoundError, PermissionError):  # PermissionError: another user's file
            if file.is_file() and time.time() - file.stat().st_mtime > ABANDONED:
                file.unlink()
