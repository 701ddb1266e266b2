"""A trial of what a run needs from the file system of its folder, before it trains."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rptrain.checkpoint.atomic_dir import SLACK, remove, sync_folder, written_aside
from rptrain.utils.replacing import replace_file

PREFIX = ".rptrain-trial-"
REMEDY = "set save.output_dir to a folder on another file system"
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a file system that refuses nothing, but has no space left


def try_saving(folder: Path) -> bool:
    """Does in a folder what saves and records do, and leaves nothing there. Returns whether folders are synced, too.

    OSError if the file system is full, or refuses something. Its `strerror` says what.
    """
    with TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True) as name:
        place = Path(name)
        with _refused("sync a folder"):
            synced = sync_folder(place)
        with _refused("replace a file"):
            for content in (b"old", b"new"):
                replace_file(place / "file", content)
        with _refused("rename a folder of files"):
            with written_aside(place / "saved", {"kind": "trial"}, -SLACK) as aside:  # plans check the free space
                aside.write_json("file.json", {})
            remove(place / "saved")
    return synced


def remedy(error: OSError) -> str:
    """What to do about an error of `try_saving`."""
    return f"free disk space, or {REMEDY}" if error.errno in FULL else REMEDY


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        raise OSError(error.errno, f"its file system does not {what} ({error.strerror or error})") from error
