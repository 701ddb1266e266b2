"""Learning-rate schedules as pure functions of the step, with the values of transformers' `get_scheduler`."""

from math import ceil, cos, pi
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "constant", "constant_with_warmup"]


def warmup_length(warmup_steps: float, total_steps: int) -> int:
    """The number of warm-up steps. A `warmup_steps` below 1 is a fraction of the total, rounded up."""
    return ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)


def learning_rate(step: int, *, base: float, kind: ScheduleKind, warmup_steps: float, total_steps: int) -> float:
    """The learning rate of a step. Steps count from 0; the warm-up starts there with a rate of 0.

    `constant` ignores the warm-up. After `total_steps`, cosine and linear stay at 0.
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
