"""A lock on the target of an export: two exports that overlap would delete each other's work.

The lock is that of the system on a hidden file beside the target, and ends with the process, however that ends.
"""

import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ELOOP
from pathlib import Path

from rptrain.checkpoint.atomic_dir import beside
from rptrain.utils.errors import UserError
from rptrain.utils.locks import lock
from rptrain.utils.text import one_line

SUFFIX = ".rptrain-lock"
START = b"locked by "  # of a lock's file, before the process
LONGEST = 256  # bytes of it that are read
WAIT = "wait until it has ended, or choose another directory"

log = logging.getLogger(__name__)


@contextmanager
def locked(to: Path, *, force: bool) -> Iterator[None]:
    """Locks the absolute target of an export during the block, and creates its parent folders, which stay if the block
    ends without an error.

    UserError if another process exports to it, or to a folder that holds it, or with `force` to one in it; if a parent
    is not a folder; or if the hidden file is something that rptrain did not write. OSError if it cannot be created. A
    file system without locks is reported in the log.
    """
    missing = [folder for folder in to.parents if not os.path.lexists(folder)]
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:  # also a link to itself
        raise UserError(f"{error.filename} is not a directory: choose another one to export to") from error
    try:
        with _locked_file(to):
            _check_above(to)
            if force:  # otherwise whatever is in the target is refused
                _check_below(to)
            yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # others may use it by now
                folder.rmdir()
        raise


@contextmanager
def _locked_file(to: Path) -> Iterator[None]:
    path = beside(to, SUFFIX)
    while True:
        descriptor = _open(path)
        try:
            try:
                reason = lock(descriptor)
            except BlockingIOError:
                raise UserError(f"another export to {to} is running{_holder(descriptor)}: {WAIT}") from None
            if reason is not None:
                log.warning("%s: its file system has no locks (%s): do not start a second export to it", to, reason)
            elif not _is_at(path, descriptor):  # the process that held it has deleted it
                continue
            with suppress(OSError):  # another user's file, or a full disk: only for messages
                content = START + f"process {os.getpid()} on {socket.gethostname()}".encode(errors="replace")
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, content, 0)
            try:
                yield
            finally:
                with suppress(OSError):  # another user's file in a folder like /tmp
                    if _is_at(path, descriptor):
                        path.unlink()
            return
        finally:
            os.close(descriptor)


def _check_above(to: Path) -> None:
    """UserError if another process exports to a folder that holds the target."""
    parent = Path(os.path.realpath(to.parent))
    for folder in (parent, *parent.parents):
        if folder.name and (holder := _held(beside(folder, SUFFIX))) is not None:
            raise UserError(f"an export to {folder}, which holds {to}, is running{holder}: {WAIT}")


def _check_below(to: Path) -> None:
    """UserError if another process exports to a folder in the target."""
    for level, _, files in os.walk(to):
        for name in files:
            if name.endswith(SUFFIX) and (holder := _held(Path(level, name))) is not None:
                inner = Path(level, name.removeprefix(".").removesuffix(SUFFIX))
                raise UserError(f"an export to {inner}, which is in {to}, is running{holder}: {WAIT}")


def _held(path: Path) -> str | None:
    """The process that has locked a file, as `_holder` gives it; None if nobody has, or if that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        lock(descriptor, shared=True)
    except BlockingIOError:
        return _holder(descriptor)
    finally:
        os.close(descriptor)
    return None


def _open(path: Path) -> int:
    """Opens the file of a lock. UserError if it is something else, which is left as it is."""
    in_the_way = UserError(f"{path} is in the way and was not written by rptrain: move or delete it")
    flags = os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except IsADirectoryError:
        raise in_the_way from None
    except PermissionError:
        if not os.path.lexists(path):
            raise
        descriptor = os.open(path, os.O_RDONLY | flags)  # another user's
    except OSError as error:
        raise in_the_way if error.errno == ELOOP else error from None
    content = os.pread(descriptor, LONGEST, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if content is None or not START.startswith(content[: len(START)]):
        os.close(descriptor)
        raise in_the_way
    return descriptor


def _holder(descriptor: int) -> str:
    """The process in the file of a lock, in brackets; empty if it does not say."""
    content = os.pread(descriptor, LONGEST, 0)
    named = content.removeprefix(START).decode(errors="replace") if content.startswith(START) else ""
    return f" ({one_line(named)})" if named else ""


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False
