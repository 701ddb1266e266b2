"""The other processes that train a model, as an engine needs them; `distributed/` implements this."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from rptrain.engine.context import Context
from rptrain.engine.memory.share import Share
from rptrain.engine.optim.adam import CpuAdam
from rptrain.engine.optim.gradients import Gradients


class Weights(Protocol):
    """A thread that sends updated weights to the other processes, and receives theirs."""

    def submit(self, version: int, order: Sequence[int]) -> None:
        """Exchanges the units of a version in this order."""

    def end(self) -> Sequence[threading.Thread]:
        """Ends the thread, which is returned, after what was submitted."""
        ...


class Partners(Protocol):
    """The other processes that train the model."""

    @property
    def share(self) -> Share:
        """The share of this process."""
        ...

    def sum_gradients(self, context: Context, adam: CpuAdam, tell: Callable[[str], None]) -> Gradients:
        """The gradients of an iteration, summed over all processes."""
        ...

    def exchange_weights(self, context: Context, adam: CpuAdam, publish: Callable[[int, int], None]) -> Weights:
        """`publish` gets the unit and the version of weights once they are complete."""
        ...

    def on_loss(self, call: Callable[[BaseException], None] | None) -> None:
        """Calls it, in another thread, once a process is known to be lost."""

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process has failed."""
