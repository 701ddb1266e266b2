"""The dynamic loss scale of float16: which step's outcome changes which iteration's scale."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class LossScale:
    """A power of two that belongs to a version of the weights: after step t it follows from the outcomes up to t.

    An iteration's loss is multiplied by the scale of the version that it computes with: step t by `scale` after step
    t - 1 in sync, after step t - 2 in async, where step t begins before the outcome of step t - 1 is known.
    """

    scale: float  # of the newest version
    before: float  # of the version before it
    good: int  # steps at `scale` since its last change, none of them skipped
    growth_steps: int  # it doubles after so many of them; 0: it never changes

    @classmethod
    def start(cls, scale: float, growth_steps: int) -> Self:
        """That of weights of which both versions are the same."""
        return cls(scale, scale, 0, growth_steps)

    def used(self, *, asynchronous: bool) -> float:
        """What the next step to end has had its loss multiplied by."""
        return self.before if asynchronous else self.scale

    def after(self, *, asynchronous: bool, skipped: bool) -> Self:
        """Behind the next step: half of what a skipped one used, once for all that used the same; doubled behind the
        last of `growth_steps` good ones.

        A good step that used another scale than the newest says nothing about it, and does not count.
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
