"""Temporary files, deleted when the process ends. A process that ends with `os._exit` calls `delete_all` first."""

import atexit
import os
from pathlib import Path
from tempfile import mkstemp

_files = set[str]()
os.register_at_fork(after_in_child=_files.clear)  # they belong to the parent


def create(suffix: str) -> tuple[int, str]:
    """A new file in the folder of temporary files, as a descriptor and a path. Raises OSError."""
    descriptor, path = mkstemp(prefix="rptrain-", suffix=suffix)
    _files.add(path)
    return descriptor, path


def delete(path: str) -> None:
    """Deletes a file of `create`, unless this process is a fork of the one that created it."""
    if path in _files:
        _files.discard(path)
        Path(path).unlink(missing_ok=True)


@atexit.register
def delete_all() -> None:
    for path in _files.copy():
        delete(path)
