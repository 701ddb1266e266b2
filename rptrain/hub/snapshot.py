"""Files of a repository in the hub's cache, where Hugging Face's libraries and `model.path` find them."""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from rptrain.hub.errors import explained_errors
from rptrain.hub.repository import RemoteFile, Repository
from rptrain.hub.transfer import PARTIAL, Stopped, download
from rptrain.utils.errors import UserError
from rptrain.utils.paths import writable_place
from rptrain.utils.phases import phase
from rptrain.utils.replacing import replace_file
from rptrain.utils.units import format_bytes

AT_ONCE = 4  # files that are downloaded at the same time
SLACK = 64 << 20  # bytes of free space that are left


def fetch(repository: Repository, files: Sequence[RemoteFile]) -> None:
    """Downloads the content of files that the cache lacks. `link` makes them files of the snapshot.

    UserError if there is too little space, and as `explained_errors`. After an error or an interrupt the next call
    continues where this one stopped.
    """
    waiting = [*{file.digest: file for file in files if not _is_there(repository, file)}.values()]
    _check_space(repository, waiting)
    stopping = Event()
    with explained_errors(repository.name, repository.what), phase(_named(repository, files)) as progress:
        progress.total = sum(file.size for file in waiting)
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            tasks = [
                pool.submit(download, repository.url(file), file, repository.blob(file), progress.add, stopping)
                for file in sorted(waiting, key=lambda file: -file.size)
            ]
            finished, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            failed = [error for task in finished if (error := task.exception()) is not None]
            if failed:
                raise next((error for error in failed if not isinstance(error, Stopped)), failed[0])
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)


def link(repository: Repository, files: Sequence[RemoteFile]) -> Path:
    """Makes fetched files, in this order, those of the snapshot, and the snapshot that of the revision. Returns it."""
    for file in files:
        place = repository.snapshot / file.name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)  # a link to content that is gone
            _put(repository.blob(file), place)
    if repository.revision != repository.commit:
        reference = repository.folder / "refs" / repository.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        replace_file(reference, repository.commit.encode())
    return repository.snapshot


def read(repository: Repository, file: RemoteFile) -> Path:
    """The path of a small file's content, fetched if the cache lacks it."""
    fetch(repository, [file])
    place = repository.snapshot / file.name
    return place if place.exists() else repository.blob(file)


def missing_bytes(repository: Repository, files: Sequence[RemoteFile]) -> int:
    """The bytes of the files that are still to be transferred."""
    waiting = {file.digest: file for file in files if not _is_there(repository, file)}
    return sum(file.size - _partly(repository, file) for file in waiting.values())


def _partly(repository: Repository, file: RemoteFile) -> int:
    """The bytes of a file that an earlier download left."""
    blob = repository.blob(file)
    try:
        return min(file.size, os.path.getsize(blob.with_name(blob.name + PARTIAL)))
    except FileNotFoundError:
        return 0


def _is_there(repository: Repository, file: RemoteFile) -> bool:
    """Whether the cache has the content, in `blobs` or, on file systems without links, in the snapshot alone."""
    return any(place.is_file() for place in (repository.blob(file), repository.snapshot / file.name))


def _check_space(repository: Repository, files: Sequence[RemoteFile]) -> None:
    needed = missing_bytes(repository, files) + SLACK
    place = writable_place(repository.folder)
    disk = shutil.disk_usage(place)
    if files and disk.total and disk.free < needed:  # some FUSE file systems and ramfs have no size
        raise UserError(
            f"{repository.name} needs {format_bytes(needed)} of disk space, and {place} has {format_bytes(disk.free)} "
            "free: free some, or set HF_HUB_CACHE to a folder on a larger disk"
        )


def _named(repository: Repository, files: Sequence[RemoteFile]) -> str:
    return f"downloading {repository.name}" if len(files) > 1 else f"downloading {files[0].name}"


def _put(blob: Path, place: Path) -> None:
    """A link to the content, or the content itself on file systems without links."""
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except FileExistsError:  # another process was faster
        return
    except OSError:
        blob.replace(place)
