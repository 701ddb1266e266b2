"""Compare steps that a resumed run trains again with their earlier records."""

from collections.abc import Callable
from math import isfinite

from rptrain.runs.records.events import Event, LossDiffers, LossesRepeated
from rptrain.runs.view.series import Steps


class RepeatedSteps:
    """Emits whether the losses of steps after `done` are those in the earlier records: once all of them are, or at the
    first one that differs. Steps without an earlier record do not count.
    """

    def __init__(self, earlier: Steps, done: int, emit: Callable[[Event], None]) -> None:
        first = earlier.since(done)
        self._recorded = dict(zip(earlier.column("step")[first:], earlier.column("loss")[first:], strict=True))
        self._last = max(self._recorded, default=0)
        self._equal: list[int] = []  # steps
        self._emit = emit

    def add(self, step: int, loss: float) -> None:
        """A step was recorded."""
        if not self._recorded:
            return
        if (recorded := self._recorded.get(step)) is not None:
            if recorded != loss and (isfinite(recorded) or isfinite(loss)):
                self._emit(LossDiffers(step, *(value if isfinite(value) else None for value in (loss, recorded))))
                self._recorded.clear()
                return
            self._equal.append(step)
        if step >= self._last:
            self._recorded.clear()
            if self._equal:
                self._emit(LossesRepeated(self._equal[0], self._equal[-1], len(self._equal)))
