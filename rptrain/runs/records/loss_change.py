"""How the loss changed over a run, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from rptrain.utils.text import counted
from rptrain.utils.units import format_loss

FIRST = 5  # maximum number of reports in the first value: in the next ones a high loss falls fast
LAST = 20  # the same of the last value
PART = 5  # values are medians of a fifth of a short run, so that a spike is neither the first nor the last
MOST = 0.99  # the largest fall that is given as a percentage
REPORTS, STEPS = 10, 50  # from which on a loss that hardly falls is worth a hint
SMALL = 0.05  # the largest fall, as a fraction, for which a hint is given


@dataclass(frozen=True)
class LossChange:
    """Medians of the first and the last losses of a run."""

    first: float
    last: float
    reports: int  # of the loss

    def __str__(self) -> str:
        """Such as "median loss 10.380 -> 9.9200 (-4.4%)"; of a short run, the first and the last loss."""
        name = "loss" if self.reports < 2 * PART else "median loss"
        return f"{name} {format_loss(self.first)} -> {format_loss(self.last)}{self._percent}"

    @property
    def _percent(self) -> str:
        if self.first <= 0:
            return ""
        share = self.last / self.first - 1
        if share < -MOST:  # "-100%" would say that the loss is 0
            return ""
        return f" ({share:+.1%})" if abs(share) < 0.0995 else f" ({share:+,.0%})"

    def hint(self, steps: int) -> str | None:
        """What to try if the loss hardly fell in a run of `steps`; None if it fell, or if the run was too short."""
        if self.reports < REPORTS or steps < STEPS or self.first <= 0 or self.last < self.first * (1 - SMALL):
            return None
        if self.last >= self.first:
            return "The loss did not fall: the learning rate (optim.learning_rate) may be too low or too high."
        return (
            f"The loss fell by less than {SMALL:.0%}: the learning rate (optim.learning_rate) may be too low, or the "
            "run too short."
        )


def finished_sentence(steps: int, change: LossChange | None = None) -> str:
    """Such as "finished after 60 steps: median loss 10.380 -> 9.9200 (-4.4%)"; no loss if its change is unknown."""
    return f"finished after {counted(steps, 'step')}" + ("" if change is None else f": {change}")


def loss_change(losses: Sequence[float]) -> LossChange | None:
    """The change of a loss, from all values in order; None for less than two finite ones."""
    known = [loss for loss in losses if isfinite(loss)]
    part = max(len(known) // PART, 1)
    if len(known) < 2:
        return None
    return LossChange(median(known[: min(part, FIRST)]), median(known[-min(part, LAST) :]), len(known))
