"""Exceptions for errors that a user can fix."""


class UserError(ValueError):
    """A mistake in the input. The message says what is wrong and what to do; commands exit with status 2."""


class TrainingError(RuntimeError):
    """Training cannot continue. The message says why and what to do; commands exit with status 1."""


class RunDeleted(TrainingError):
    """The folder of a run was deleted or moved during training, so nothing can be written."""
