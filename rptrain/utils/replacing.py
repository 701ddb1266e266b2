"""Replacement of a file as a whole, which a full disk or a kill cannot leave half written."""

import os
import secrets
import shutil
from contextlib import suppress
from os.path import realpath
from pathlib import Path

from rptrain.utils.files import naming


def remove_unfinished(folder: Path) -> None:
    """Removes what `replace_file` left in a folder when its process was killed. Nobody may be writing there."""
    for file in folder.glob(".rptrain-*.part"):
        file.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file atomically and keeps its mode and links to it. After an OSError, which names the path, the earlier
    file is unchanged.

    The content is first written to a new file in the same folder, and synced.
    """
    file = Path(realpath(path))
    aside = file.with_name(f".rptrain-{secrets.token_hex(8)}.part")
    try:
        with naming(path):
            with aside.open("xb") as new:
                new.write(content)
                new.flush()
                os.fsync(new.fileno())
            if file.exists():
                shutil.copymode(file, aside)
            aside.replace(file)
    finally:
        with suppress(OSError):  # renamed to the file
            aside.unlink()
