"""Exceptions of the engine."""


class EngineError(RuntimeError):
    """A thread of the engine failed. The message names the device, the stage and the micro-batch."""


class Aborted(Exception):
    """Raised in waiting threads when another thread failed or the engine closes; never reaches the caller."""
