"""Digests of files that were read before, which are kept for later processes as long as the files do not change.

Each file has an entry in a folder of the user's cache, under a name that depends on its path and its state. An entry is
read only if it belongs to the user and nobody else can write it; anything else counts as missing, and so do damaged
entries. A digest that is kept can only show that a file is right: before a file is refused, it is hashed again.
"""

import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.file_state import FileState
from rptrain.utils.objects import unique_keys
from rptrain.utils.paths import from_environment
from rptrain.utils.private import check_own, close_own_folder, own_folder

KEPT = 4000  # entries; the oldest are deleted
RECENT = 3.0  # seconds after a change in which no entry is made: some file systems count time in seconds
MAX_ENTRY = 64 << 20  # bytes


def folder() -> Path:
    """The folder of the entries. Raises UserError if the home directory is unknown."""
    return from_environment("XDG_CACHE_HOME", "~/.cache") / "rptrain" / "digests"


def kept_digests(file: Path, state: FileState) -> dict[str, str]:
    """The digests of a file with this state, by what they cover; empty if there are none."""
    with suppress(OSError, UserError, ValueError, RecursionError), own_folder(folder()) as place:
        content = _read(_name(file, state), place)
        found = json.loads(content, object_pairs_hook=unique_keys)
        if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
            return found
    return {}


def keep_digests(file: Path, state: FileState, digests: Mapping[str, str]) -> None:
    """Keeps digests of a file, which had this state before and after it was read, besides those that are kept already.

    Does nothing for a file that was just changed, or if the cache cannot be written.
    """
    if time.time() - max(state.changed_ns, state.modified_ns) / 1e9 < RECENT:
        return
    content = json.dumps({**kept_digests(file, state), **digests}).encode()
    with suppress(OSError, UserError):
        path = folder()
        close_own_folder(path, "*.json")
        with own_folder(path) as place:
            _write(_name(file, state), content, place)
            _prune(place)


def _name(file: Path, state: FileState) -> str:
    described = json.dumps([os.path.realpath(file), *state]).encode(errors="surrogatepass")
    return f"{sha256(described).hexdigest()}.json"


def _read(name: str, place: int) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    with open(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        check_own(name, found)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_ENTRY:
            raise PermissionError
        return stream.read(MAX_ENTRY)


def _write(name: str, content: bytes, place: int) -> None:
    """Writes a file atomically, but does not sync it: an entry that is lost is made again."""
    aside = f".{secrets.token_hex(8)}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(content)
        os.rename(aside, name, src_dir_fd=place, dst_dir_fd=place)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside, dir_fd=place)
        raise


def _prune(place: int) -> None:
    """Deletes the oldest entries, and what killed processes left."""
    names = os.listdir(place)
    if len(names) <= KEPT:
        return
    ages: dict[str, int] = {}
    for name in names:
        with suppress(FileNotFoundError):  # another process prunes, too
            ages[name] = os.stat(name, dir_fd=place, follow_symlinks=False).st_mtime_ns
    for name in sorted(ages, key=lambda name: ages[name])[: -KEPT // 2]:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place)
