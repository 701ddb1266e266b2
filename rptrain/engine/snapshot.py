"""A consistent view of the state after a step: the optimizer does not touch a unit until it is released."""

import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rptrain.engine.board import Board
from rptrain.engine.optim.loss_scale import LossScale


class Snapshot:
    """Units of the store do not change until `release`, which any thread may call; leaving the context releases all.

    Units are updated in `order`, which is therefore the best order to release them in. `applied` and `loss_scale` are
    the engine's after the step. `number` counts snapshots; the board's ("saved", unit) is the last snapshot from which
    the unit was released.
    """

    def __init__(self, board: Board, number: int, units: Iterable[int], applied: int, loss_scale: LossScale) -> None:
        self.order, self.applied, self.loss_scale = tuple(units), applied, loss_scale
        self.waited = 0.0  # seconds that updates waited for units
        self._board, self._number, self._held = board, number, set(self.order)
        self._lock = threading.Lock()

    def release(self, unit: int) -> None:
        """Allows the optimizer to update the unit."""
        with self._lock:
            if unit in self._held:
                self._held.discard(unit)
                self._board.publish(("saved", unit), self._number)

    @property
    def released(self) -> bool:
        """Whether all units were released."""
        return not self._held

    def wait(self, unit: int) -> None:
        """Blocks until the unit was released. Called by the optimizer before an update. Raises Aborted."""
        began = time.perf_counter()
        self._board.wait(("saved", unit), self._number)
        self.waited += time.perf_counter() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for unit in list(self._held):
            self.release(unit)
