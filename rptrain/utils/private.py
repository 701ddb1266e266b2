"""Files of the user's cache folders: what another user can have written is not read, and nobody else writes there."""

import os
import stat
from io import BufferedReader
from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.files import check_size, open_regular


class Untrusted(UserError):
    """A file or a folder belongs to another user, or others may write to it."""


def check_own(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Untrusted unless only this user, or root, can have written a file or the names in a folder."""
    if status.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"{os.fspath(path)} belongs to another user (uid {status.st_uid}) and is not used")
    if status.st_mode & 0o022:
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
