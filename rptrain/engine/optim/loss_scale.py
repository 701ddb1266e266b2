"""The dynamic loss scale of float16."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class LossScale:
    """The loss scale of a version of the weights: a power of two that depends on the outcomes of all steps so far.

    An iteration's loss is multiplied by the scale of the version that it computes with: step t by `scale` after step
    t - 1 in sync, after step t - 2 in async, where step t begins before the outcome of step t - 1 is known.
    """

    scale: float  # scale of the newest version
    before: float  # scale of the previous version
    good: int  # steps at `scale` since its last change, none of them skipped
    growth_steps: int  # the scale doubles after this many; 0: it never changes

    @classmethod
    def start(cls, scale: float, growth_steps: int) -> Self:
        """The scale for weights whose two versions are equal."""
        return cls(scale, scale, 0, growth_steps)

    def used(self, *, asynchronous: bool) -> float:
        """The scale that the next step to end was computed with."""
        return self.before if asynchronous else self.scale

    def after(self, *, asynchronous: bool, skipped: bool) -> Self:
        """The scale after the next step. A skipped step halves the scale it used, once for all steps that used it. The
        last of `growth_steps` good steps doubles it; a good step with an older scale does not count.
        """
        used = self.used(asynchronous=asynchronous)
        scale, good = self.scale, self.good
        if not self.growth_steps:
            pass
        elif skipped:
            scale, good = min(scale, used / 2), 0
        elif used == scale:
            good += 1
            if good == self.growth_steps:
                scale, good = 2 * scale, 0
        return type(self)(scale, self.scale, good, self.growth_steps)


UNSCALED = LossScale.start(1.0, 0)
