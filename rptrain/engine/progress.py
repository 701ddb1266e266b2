"""How far a step in progress is."""

from dataclasses import dataclass
from time import monotonic

from rptrain.schedule.plan import Stage

BACKWARD = 3  # times the work of a forward pass: the recomputation, and two products for each one of forward
EARLY = 0.01  # the share of a step from which the time that is left is estimated


def work_of(stage: Stage) -> int:
    """The work of a pass over a stage, in forward passes over a layer."""
    return len(stage.layers) * (BACKWARD if stage.backward else 1)


@dataclass(frozen=True)
class StepProgress:
    """How far a step is. `computed` and `updated` are shares of its forward and backward passes and of its update."""

    micro_batches: int
    computed: float
    updated: float
    began: float | None  # when its first micro-batch was issued, as `time.monotonic` counts; None before
    update_seconds: float  # duration of the last update

    @property
    def done(self) -> int:
        """Micro-batches that are computed; those that went through a part of the stages count in part."""
        return int(self.micro_batches * self.computed)

    @property
    def left(self) -> float | None:
        """Seconds until its end, if it keeps its pace; None before that is known."""
        if self.began is None or self.computed < EARLY:
            return None
        computing = (monotonic() - self.began) * (1 - self.computed) / self.computed
        return computing + self.update_seconds * (1 - self.updated)

    @property
    def share(self) -> float:
        """The share of its time that has passed; without a known duration, that of its passes."""
        if self.began is None or (left := self.left) is None:
            return self.computed
        return 1 - left / (monotonic() - self.began + left)
