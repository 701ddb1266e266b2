"""What can go wrong while a plan runs, and where it did."""


class EngineError(RuntimeError):
    """A thread of the engine failed; the message says on which device, in which stage and micro-batch."""


class Aborted(Exception):
    """Raised in a thread that waits when another thread failed or the engine closes; never reaches the caller."""
