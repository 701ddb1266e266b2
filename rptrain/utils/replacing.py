"""Replacement of a file as a whole, which a full disk or a kill cannot leave half written."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import BinaryIO

from rptrain.utils.files import change_mode, naming

PARTIAL = ".rptrain-partial"  # suffix of hidden files and folders that are not complete yet


def remove_unfinished(folder: Path) -> None:
    """Removes what `replacing` left in a folder when its process was killed. Nobody may be writing there."""
    for file in folder.glob(".rptrain-*.part"):
        file.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Writes a file atomically, as `replacing` does."""
    with replacing(path, mode) as new:
        new.write(content)


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block, with the mode of the earlier file, to which
    links stay links. After an exception the earlier file is unchanged; an OSError names the path.

    The new file is in the same folder, and synced. With a `mode` the new file has it, whatever the earlier one's, and a
    link is replaced itself.
    """
    file = Path(realpath(path)) if mode is None else path
    aside = file.with_name(f".rptrain-{secrets.token_hex(8)}.part")
    try:
        with naming(path):
            opener = partial(os.open, mode=0o666 if mode is None else mode)
            with open(aside, "xb", opener=opener) as new:
                yield new
                new.flush()
                os.fsync(new.fileno())
            if mode is None and file.exists():
                change_mode(aside, stat.S_IMODE(file.stat().st_mode))
            aside.replace(file)
    finally:
        with suppress(OSError):  # renamed to the file
            aside.unlink()
