"""Exceptions for errors that a user can fix, and the text of any exception."""


class UserError(ValueError):
    """A mistake in the input. The message says what is wrong and what to do; commands exit with status 2."""


class TrainingError(RuntimeError):
    """Training cannot continue. The message says why and what to do; commands exit with status 1."""


class RunDeleted(TrainingError):
    """The folder of a run was deleted or moved during training, so nothing can be written."""


def describe(error: BaseException, *, with_type: bool = False) -> str:
    """The message of an exception, or the name of its type if it has none. `__str__` may raise.

    `with_type` puts the name of the type before the message.
    """
    name = type(error).__name__
    try:
        message = str(error)
    except Exception as raised:  # noqa: BLE001 (an exception of another library may do anything in `__str__`)
        return f"{name} (its message cannot be shown: __str__ raised {type(raised).__name__})"
    if not message:
        return name
    return f"{name}: {message}" if with_type else message
