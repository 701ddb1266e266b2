"""Locks on open files, on file systems that have locks."""

import fcntl


def lock(descriptor: int, *, shared: bool = False) -> str | None:
    """Locks an open file until it is closed. BlockingIOError if another process holds the lock.

    Returns None, or why the file system has no locks: NFS without its lock service, and some FUSE file systems. The
    file is not locked then.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        return error.strerror or str(error)
    return None
