"""Exceptions for errors that a user can fix, and the text of any exception."""

import errno

from rptrain.utils.text import LINES, as_message

# What to do about what the system says is wrong with a path that was given. Its other errors are a disk's.
_PATH_ADVICE = {
    errno.EACCES: "change its permissions, or name another path",
    errno.EISDIR: "it is a folder, and a file is needed: name another path",
    errno.ELOOP: "replace the links by the file or folder itself",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOENT: "create it, or name another path",
    errno.ENOTDIR: "a part of it is a file, and a folder is needed: name another path",
    errno.EPERM: "name another path",
    errno.EROFS: "name a path on a disk that can be written",
}
_MEMORY = "raise the limit of `ulimit -v` or of the container, or free memory"
_ADVICE = {
    errno.EAGAIN: "raise the limit of processes (ulimit -u)",
    errno.EDQUOT: "free some of the disk space that you may use",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: _MEMORY,
    errno.ENOSPC: "free disk space",
} | _PATH_ADVICE


class UserError(ValueError):
    """A mistake in the input. The message says what is wrong and what to do; commands exit with status 2.

    It may quote input as it is: `as_message` makes it fit for a terminal, in at most `lines` lines.
    """

    def __init__(self, message: str, lines: int = LINES) -> None:
        super().__init__(as_message(message, lines))


class TrainingError(RuntimeError):
    """Training cannot continue. The message, as that of a UserError, says why and what to do; commands exit with 1."""

    def __init__(self, message: str) -> None:
        super().__init__(as_message(message))


class RunDeleted(TrainingError):
    """The folder of a run was deleted or moved during training, so nothing can be written."""


def describe(error: BaseException, *, with_type: bool = False) -> str:
    """The message of an exception as `as_message` gives it, or the name of its type if it has none.

    An error of the system is described by its path and its reason. `__str__` may raise.

    `with_type` puts the name of the type before the message.
    """
    name = type(error).__name__
    try:
        message = as_message(_of_system(error) if isinstance(error, OSError) else str(error))
    except Exception as raised:  # noqa: BLE001 (an exception of another library may do anything in `__str__`)
        return f"{name} (its message cannot be shown: __str__ raised {type(raised).__name__})"
    if not message:
        return name
    return as_message(f"{name}: {message}") if with_type else message


def explained(error: OSError) -> UserError | TrainingError:
    """What ends a command at an error of the system: its path, its reason, and what to do.

    A UserError if a path that was given cannot be used, and otherwise a TrainingError.
    """
    advice = f": {_ADVICE[error.errno]}" if error.errno in _ADVICE else ""
    kind = UserError if error.errno in _PATH_ADVICE else TrainingError
    return kind(f"{describe(error)}{advice}")


# As torch says it, and the loader of libraries.
_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "failed to map segment from shared object")


def out_of_resources(error: BaseException) -> TrainingError | None:
    """What ends a command if no thread can be started or no memory allocated, here or in what caused it; None for any
    other error.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = describe(cause)
        if isinstance(cause, RuntimeError) and "can't start new thread" in text:
            return TrainingError("no more threads can be started: raise the limits of `ulimit -u` and `ulimit -v`")
        refused = isinstance(cause, RuntimeError | ImportError) and any(words in text for words in _NO_MEMORY)
        if isinstance(cause, MemoryError) or refused:
            return TrainingError(f"memory cannot be allocated: {_MEMORY}")
        cause = cause.__cause__ or cause.__context__
    return None


def _of_system(error: OSError) -> str:
    """Without the number of the error and the quotes that `str` has."""
    if error.strerror is None:
        return str(error)
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([" and ".join(names), str(error.strerror)] if names else [str(error.strerror)])
