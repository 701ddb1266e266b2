"""Files of the user's cache folders: what another user can have written is not read, and nobody else writes there."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.files import check_size, open_regular

OTHERS = stat.S_IWGRP | stat.S_IWOTH  # the right of others to write


class Untrusted(UserError):
    """A file or a folder belongs to another user, or others may write to it."""


def check_own(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Untrusted unless only this user, or root, can have written a file or the names in a folder."""
    if status.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"{os.fspath(path)} belongs to another user (uid {status.st_uid}) and is not used")
    if status.st_mode & OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise Untrusted(f"{os.fspath(path)} may be written by other users (mode {mode:03o}) and is not used")


def open_own(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a file to read bytes. Raises as `open_regular`, and Untrusted as `check_own` for what was opened."""
    file = open_regular(path)
    try:
        check_own(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def read_own(path: str | os.PathLike[str]) -> bytes:
    """The content of a small file. Raises as `read_small`, and Untrusted as `check_own`."""
    with open_own(path) as file:
        check_size(file, path)
        return file.read()


def make_own_folder(folder: Path) -> None:
    """Creates a folder, and its missing parents, that only this user can enter. One that exists stays as it is."""
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # FileExistsError if it is not a folder


def close_own_folder(folder: Path, entries: str | None = None) -> None:
    """Creates a folder as `make_own_folder` does. Closes this user's own to others if they may write to it, and deletes
    its `entries` then, a pattern: others may have given them other names. OSError if it is a link.
    """
    make_own_folder(folder)
    with _opened(folder) as place:
        status = os.fstat(place)
        if status.st_uid != os.geteuid() or not status.st_mode & OTHERS:
            return
        with suppress(PermissionError):  # a file system without modes
            os.fchmod(place, 0o700)
        for entry in folder.glob(entries) if entries else ():
            with suppress(FileNotFoundError):  # another process deletes them, too
                os.unlink(entry.name, dir_fd=place)


@contextmanager
def own_folder(folder: Path) -> Iterator[int]:
    """A descriptor of a folder of this user's, to which nobody else may write: otherwise Untrusted. OSError if it is a
    link. Root's folders are not taken: this user's entries are not there.
    """
    with _opened(folder) as place:
        status = os.fstat(place)
        check_own(folder, status)
        if status.st_uid != os.geteuid():
            raise Untrusted(f"{folder} belongs to another user (uid {status.st_uid}) and is not used")
        yield place


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
