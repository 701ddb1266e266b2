"""Exceptions of the engine."""


class EngineError(RuntimeError):
    """A thread of the engine failed. The message names the device, the stage and the micro-batch.

    `device`: the device at fault, or the thread; `place`: the work in progress.
    """

    def __init__(self, message: str, device: str = "", place: str = "") -> None:
        super().__init__(message)
        self.device, self.place = device, place


class Aborted(Exception):
    """Raised in waiting threads when another thread failed or the engine closes; never reaches the caller."""
