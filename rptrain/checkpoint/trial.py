"""A trial of what a run needs from the file system of its folder, before it trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rptrain.checkpoint.atomic_dir import SLACK, remove, sync_folder, written_aside
from rptrain.utils.replacing import replace_file

PREFIX = ".rptrain-trial-"
REMEDY = "set save.output_dir to a folder on another file system"


def try_saving(folder: Path) -> bool:
    """Does in a folder what saves and records do, and leaves nothing there. Returns whether folders are synced, too.

    OSError if the file system refuses something. Its `strerror` says what.
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


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"its file system does not {what} ({error.strerror or error})") from error
