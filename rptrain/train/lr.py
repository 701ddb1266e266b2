"""Learning-rate schedules, as pure functions of the step; the values are transformers' `get_scheduler`'s."""

from math import ceil, cos, pi
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "constant", "constant_with_warmup"]


def warmup_length(warmup_steps: float, total_steps: int) -> int:
    """Steps of warm-up: a number below 1 is a share of the total, rounded up."""
    return ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)


def learning_rate(step: int, *, base: float, kind: ScheduleKind, warmup_steps: float, total_steps: int) -> float:
    """The rate of an update; the first one is step 0, and a warm-up starts there from 0.

    `constant` takes no warm-up. After `total_steps` cosine and linear stay at 0.
    """
    if kind == "constant":
        return base
    warmup = warmup_length(warmup_steps, total_steps)
    if step < warmup:
        return base * (step / warmup)
    if kind == "constant_with_warmup":
        return base
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return base * (0.5 * (1 + cos(pi * done)) if kind == "cosine" else 1 - done)
