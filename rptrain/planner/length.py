"""How long a run is: its steps, epochs, tokens and time, and warnings about them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Self

from rptrain.config.schema import Config
from rptrain.data.amount import Amount
from rptrain.planner import short_steps
from rptrain.utils.text import about, counted, counted_about
from rptrain.utils.units import format_about, format_duration, format_epochs, format_percent

MANY_EPOCHS = 50  # passes over the data that are probably not meant
FEW_STEPS = 10  # fewer, if the amount of data sets them, are probably not meant
ENOUGH_STEPS = 100  # in which a model learns something
SHORTEST = 64  # tokens: shorter sequences are not proposed


@dataclass(frozen=True)
class RunLength:
    """The length of a run. Without the amount of data, only the steps and the time are known."""

    steps: int
    sequences: int  # of all steps
    per_step: int  # sequences of a step; the last one of an epoch can have fewer
    seconds: float | None  # of all steps; None without a plan
    epochs: float | None
    steps_per_epoch: int | None
    samples: int | None  # of the training sets
    tokens: int | None  # of all steps, without padding
    exact: bool  # whether the data was counted, and not estimated from its first rows
    fixed: bool  # whether train.max_steps sets the steps, and not the amount of data
    filled: float | None = None  # fraction of the sequences that is not padding
    longest: int | None = None  # tokens of the longest sample that was read
    shorter: int | None = None  # a data.max_length that all samples fit, if it should be shorter
    measured_seconds: float | None = None  # of all steps at the speed of an earlier run with these settings
    measured_in: str | None = None  # that run

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def at_speed(self, tokens_per_second: float, run: str, length: int) -> Self:
        """With the time that it takes at the speed of an earlier run, for sequences of `length` tokens with padding."""
        return replace(self, measured_seconds=self.sequences * length / tokens_per_second, measured_in=run)


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """The steps of a run."""
    return config.train.max_steps or max(1, ceil(config.train.num_epochs * steps_per_epoch))


def length_of(
    config: Config, amount: Amount | None, seconds_per_step: float | None, seconds_of_last: float | None = None
) -> RunLength | None:
    """The length of a run; None if it depends on data of an unknown amount.

    `seconds_of_last`: the last step of an epoch, if it has fewer sequences; by default as long as the others.
    """
    batch = config.train.global_batch_size
    if amount is None:
        if config.train.max_steps is None:
            return None
        steps, short, of_data = config.train.max_steps, 0, (None, None, None, None)
        sequences = steps * batch
    else:
        steps = total_steps(config, amount.steps_per_epoch)
        epochs, rest = divmod(steps, amount.steps_per_epoch)
        sequences = epochs * amount.sequences + rest * batch
        short = epochs if amount.sequences % batch else 0
        tokens = round(sequences * config.data.max_length * amount.filled)
        of_data = steps / amount.steps_per_epoch, amount.steps_per_epoch, amount.samples, tokens
    seconds = None
    if seconds_per_step is not None:
        seconds = (steps - short) * seconds_per_step + short * (seconds_of_last or seconds_per_step)
    exact, fixed = amount is None or amount.exact, config.train.max_steps is not None
    per_step = batch if amount is None else min(batch, amount.sequences)
    found = RunLength(steps, sequences, per_step, seconds, *of_data, exact=exact, fixed=fixed)
    if amount is None or not amount.longest:
        return found
    return replace(found, filled=amount.filled, longest=amount.longest, shorter=_shorter(config, amount, found))


def _shorter(config: Config, amount: Amount, length: RunLength) -> int | None:
    """A shorter sequence that holds the longest sample, or two of them with packing; None if it would be no better.

    Without packing, the rest of a sequence is padding. With it, long sequences cost no padding, but many samples
    share one, and few data then make few steps.
    """
    packing = config.data.packing
    if packing and (length.fixed or length.steps >= FEW_STEPS):
        return None
    size = max(SHORTEST, 1 << ((2 if packing else 1) * amount.longest - 1).bit_length())
    return size if size < config.data.max_length else None


def warnings_of(config: Config, length: RunLength) -> Iterator[str]:
    """What is probably not meant, as sentences."""
    warm_up = config.optim.warmup_steps
    if warm_up >= 1 and warm_up >= length.steps:
        steps = about(length.steps, exact=length.exact or length.fixed)
        yield (
            f"the warm-up of {warm_up:,.0f} steps is not shorter than the run of {steps} steps: the learning rate "
            "never reaches its peak. Set optim.warmup_steps to a fraction, such as 0.03"
        )
    if length.steps < FEW_STEPS and not length.fixed:
        shorter = f" or data.max_length to {length.shorter:,}," if length.shorter else ""
        yield (
            f"the run has only {counted(length.steps, 'step')}, in which a model learns little: lower "
            f"train.global_batch_size,{shorter} or raise train.num_epochs{_enough(length)}"
        )
    if few := short_steps.warning(config, length.per_step, exact=length.exact):
        yield few
    if length.shorter and not config.data.packing and length.filled is not None and length.longest is not None:
        yield (
            f"{format_percent(1 - length.filled)} of the sequences is padding: the longest sample has "
            f"{length.longest:,} of data.max_length = {config.data.max_length:,} tokens; {length.shorter:,} would do"
        )
    if length.epochs is not None and length.epochs >= MANY_EPOCHS:
        key = "train.max_steps" if length.fixed else "train.num_epochs"
        times = about(round(length.epochs), exact=length.exact or not length.fixed)
        yield f"the run repeats its data {times} times, and will learn it by heart: lower {key}, or add data"


def _enough(length: RunLength) -> str:
    """The epochs that make enough steps; other advice if these are too many."""
    if length.steps_per_epoch is None:
        return ""
    epochs = ceil(ENOUGH_STEPS / length.steps_per_epoch)
    return f" to {epochs:,} for {ENOUGH_STEPS} steps" if epochs < MANY_EPOCHS else ", or add data"


def sentences(config: Config, length: RunLength) -> Iterator[str]:
    """The length of a run in words. What is estimated is "about" so much."""
    exact, whole = length.exact, length.per_step == config.train.global_batch_size
    steps = (
        f"{counted_about(length.steps, 'step', exact=exact or length.fixed)} of "
        f"{counted_about(length.per_step, 'sequence', exact=exact or whole)}"
    )
    if length.epochs is not None and length.samples is not None:
        epochs = f"{'' if exact or not length.fixed else 'about '}{format_epochs(length.epochs)}"
        steps += f": {epochs} of {counted_about(length.samples, 'sample', exact=exact)}"
    yield steps[0].upper() + steps[1:]
    parts = [] if length.tokens is None else [f"{about(length.tokens, exact=exact)} tokens without padding"]
    parts += [] if length.seconds is None else [_duration(length)]
    if parts:
        text = "; ".join(parts)
        yield text[0].upper() + text[1:]


def _duration(length: RunLength) -> str:
    assert length.seconds is not None
    if length.measured_seconds is None:
        return f"{format_about(length.seconds)} in total"
    measured, planned = format_about(length.measured_seconds), format_duration(length.seconds)
    return f"{measured} in total at the speed measured in the run {length.measured_in} (planned: {planned})"
