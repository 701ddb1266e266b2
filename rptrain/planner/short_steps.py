"""Steps with fewer sequences than train.global_batch_size: micro-batches that would only be padding are left out."""

from dataclasses import replace
from math import ceil

from rptrain.config.schema import Config
from rptrain.planner.choose import RunPlan
from rptrain.schedule.estimate import estimate
from rptrain.utils.text import counted_about


def fitted(config: Config, sequences: int | None) -> Config:
    """The config with as many micro-batches as steps have if no step has more than this many sequences.

    With several rounds, these are whole rounds. The config must not have "auto". The bits of a run do not change: it
    keeps its replicas, and several rounds stay several. None, for an unknown number, changes nothing.
    """
    train, engine = config.train, config.engine
    if sequences is None or sequences >= train.global_batch_size:
        return config
    count, at_once = ceil(sequences / train.sequences), config.round_size * config.replicas
    size: int | None = None
    if at_once < train.micro_batches or config.replicas > 1:
        size = config.round_size
        turns = max(ceil(count / at_once), 1 if config.replicas > 1 else 2)
        count = min(turns * at_once, train.micro_batches)
    train = train.model_copy(update={"global_batch_size": count * train.sequences})
    return config.model_copy(update={"train": train, "engine": engine.model_copy(update={"round_size": size})})


def tokens_of(config: Config, sequences: int | None) -> int:
    """Tokens that a step with this many sequences computes; None: a step of the config."""
    if sequences is None:
        return config.tokens
    whole = ceil(sequences / config.train.sequences) * config.train.sequences
    return min(whole * config.data.max_length, config.tokens)


def with_sequences(run: RunPlan, config: Config, sequences: int | None) -> RunPlan:
    """The plan of a config, with the estimate for steps of this many sequences; None: of all."""
    plan, setting = run.plan, run.setting
    count = plan.micro_batches if sequences is None else ceil(sequences / config.train.sequences)
    if count >= plan.micro_batches:
        return run
    busiest = sum(len(slot.micro_batches) for slot in plan.slots(0, count) if slot.stage_index == slot.group == 0)
    share = max(busiest, ceil(count / plan.concurrent))  # of the micro-batches, by a device or a group of them
    rounds = ceil(share / plan.round_size)
    size = ceil(share / rounds)
    short = replace(setting, micro_batches=rounds * size, round_size=size)
    return replace(run, estimate=estimate(run.costs, plan.stages, short))


def warning(config: Config, sequences: int, *, exact: bool = True) -> str | None:
    """A warning if an epoch has fewer sequences than a step takes. `exact`: whether these were counted."""
    batch = config.train.global_batch_size
    if sequences >= batch:
        return None
    found = counted_about(sequences, "sequence", exact=exact)
    return (
        f"an epoch has only {found}, fewer than train.global_batch_size = {batch:,}: each step takes those, and no "
        f"more. Lower train.global_batch_size for several steps per epoch"
    )
