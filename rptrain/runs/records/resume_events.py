"""Event records of a resumed run."""

from dataclasses import dataclass
from typing import ClassVar

from rptrain.runs.records.event import Event, Severity
from rptrain.runs.records.fields import Float, Int


@dataclass(frozen=True)
class Resumed(Event):
    """Training continues after `step`. Earlier records of later steps are void."""

    step: Int
    path: str

    def sentence(self) -> str:
        continued = "weights, optimizer state, data order and random numbers"
        return f"resumed from {self.path}, step {self.step}: {continued} continue from there"


@dataclass(frozen=True)
class LossesRepeated(Event):
    """After a resume, steps from `first` to `last` had the losses that were recorded before it, in `count` records."""

    first: Int
    last: Int
    count: Int

    def sentence(self) -> str:
        if self.first == self.last:
            return f"step {self.first:,} repeats the loss recorded before"
        equal = f"{self.count:,} of {self.count:,} equal"
        return f"steps {self.first:,}-{self.last:,} repeat the losses recorded before ({equal})"


@dataclass(frozen=True)
class LossDiffers(Event):
    """After a resume, the loss of a step is not the one that was recorded before it (`recorded`). Only the first such
    step since the resume has this record.
    """

    step: Int
    loss: Float | None
    recorded: Float | None

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        loss, recorded = ("not finite" if known is None else known for known in (self.loss, self.recorded))
        return (
            f"step {self.step:,}: the loss is {loss}; before the run was resumed it was {recorded}. "
            "This is expected if a setting or the kind of GPU was changed"
        )


@dataclass(frozen=True)
class CheckpointDamaged(Event):
    """A checkpoint that was to be loaded is damaged, and another one is used."""

    path: str
    message: str

    severity: ClassVar[Severity] = "warning"

    def sentence(self) -> str:
        return f"{self.message}: using another checkpoint"
