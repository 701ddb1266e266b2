"""The objects that the engine's threads share: the plan, host memory, the board and the recorder."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rptrain.engine.board import Board
from rptrain.engine.devices.base import Probe
from rptrain.engine.errors import Aborted, EngineError
from rptrain.engine.iteration import Iteration
from rptrain.engine.memory.boundary import BoundaryBuffers
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.recorder import Recorder
from rptrain.kernels.toolchain_errors import explain
from rptrain.schedule.lower import Boundaries
from rptrain.schedule.plan import Plan
from rptrain.utils.errors import describe


@dataclass
class Context:
    """The state that the engine's threads share.

    Board keys: ("boundary", ...), ("grad", unit, group), ("version", unit), ("loss", round), ("rows",),
    ("scale",), ("step",), ("saved", unit), ("evaluated", device), ("staged", device, buffer),
    ("emptied", device, buffer); with several processes ("updated", unit), ("losses",) and
    ("evaluation losses",). Version v of a unit holds the weights after v steps; its payload is the index of the
    generation. The payload of ("scale",) is the loss scale of the iteration that reads version v. Every version of a
    frozen unit is published from the start.
    """

    plan: Plan
    bounds: Boundaries
    store: ModelStore
    buffers: BoundaryBuffers
    probe: Probe | None
    recorder: Recorder
    on_failure: Callable[[BaseException], None] | None = None  # gets the first one
    failure: EngineError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def board(self) -> Board:
        return self.recorder.board

    def fail(self, where: str, error: BaseException) -> None:
        """Keeps the first failure, with the place where it happened, and releases every waiting thread."""
        error = explain(error) or error
        with self._lock:
            first = self.failure is None
            if first:
                thread = threading.current_thread().name
                text = f"{thread}, {where}: {describe(error, with_type=True)}"
                self.failure = EngineError(text, thread.partition(" ")[0], where)
                self.failure.__cause__ = error
        self.board.abort()
        if first and self.on_failure is not None:
            self.on_failure(error)

    def aborted(self) -> bool:
        return self.board.aborted

    def skip(self, iteration: Iteration) -> None:
        """Leaves out, on the board, what a short iteration does not compute."""
        plan, number = self.plan, iteration.number
        for m in range(iteration.micro_batches, plan.micro_batches):
            self.buffers.skip(self.board, number, m)
        rounds = {slot.round for slot in plan.slots(number, iteration.micro_batches)}
        for r in range(plan.rounds):
            if r not in rounds:
                self.board.skip(("loss", r), number)

    @property
    def lag(self) -> int:
        """1 in async: iteration n reads version n - 1; 0 in sync: version n."""
        return int(self.store.layout.asynchronous)

    def read_version(self, iteration: int) -> int:
        """The version of the weights that an iteration computes with."""
        return iteration - self.lag

    def guard(self, where: Callable[[], str], main: Callable[[], None]) -> None:
        """Runs a thread's main function; an exception becomes the engine's failure."""
        try:
            main()
        except Aborted:
            return
        except BaseException as error:  # noqa: BLE001 - re-raised in the caller's thread
            self.fail(where(), error)
