"""Errors that a person can mend, told apart from our own mistakes."""


class UserError(ValueError):
    """Something in the input is wrong; the message says what and what to do. The command exits with 2."""


class TrainingError(RuntimeError):
    """Training cannot go on, though nothing broke; the message says why and what to do. The command exits with 1."""


class RunDeleted(TrainingError):
    """A run's folder was deleted or moved while the run was trained: nothing can be written any more."""
