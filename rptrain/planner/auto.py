"""Choice of "auto" values before the first step: the micro-batch and round with the shortest planned step."""

from collections.abc import Callable
from dataclasses import replace
from math import isqrt, prod
from typing import Any

from rptrain.config.resolve import Resolved
from rptrain.config.schema import AUTOMATIC, Config
from rptrain.engine.meter import Measured
from rptrain.machine.hardware import Hardware
from rptrain.models.spec import ModelShape
from rptrain.planner.choose import RunPlan, least_period, step_layout
from rptrain.planner.memory import MemoryPlan, least_memory, plan_run
from rptrain.utils.errors import UserError

MICRO_BATCHES = 256  # micro-batches per step: more and smaller ones are tried only if nothing else fits
ROUNDS = (1, 2, 4)  # of each group of devices; more and smaller ones only if nothing else fits
WORTH = 0.005  # a later choice must shorten the step by this fraction


def is_automatic(config: Config) -> bool:
    """Whether the config has "auto" values."""
    return "auto" in _values(config)


def resolve_auto(
    config: Config,
    spec: ModelShape,
    hardware: Hardware,
    times: Callable[[Config], Measured | None] = lambda choice: None,
) -> Config:
    """The config with numbers in place of "auto", for this hardware. `times`: see `plan_auto`."""
    return plan_auto(config, spec, hardware, times)[0]


def plan_auto(
    config: Config,
    spec: ModelShape,
    hardware: Hardware,
    times: Callable[[Config], Measured | None] = lambda choice: None,
) -> tuple[Config, tuple[RunPlan, MemoryPlan] | None]:
    """The config with numbers in place of "auto", for this hardware, and their plan and memory; None if the config has
    no "auto", or if nothing fits.

    `times` returns the measured times for the plan of a config with numbers, or None to use estimates. It raises
    UserError if they do not apply to it; the config is then not chosen.

    If nothing fits, these are the numbers with the least missing memory, on GPUs first; a plan with them reports it.
    """

    found: dict[tuple[Any, ...], tuple[RunPlan, MemoryPlan]] = {}

    def plan(choice: Config) -> RunPlan:
        if not least_memory(choice, spec, hardware).fits:  # no search for a plan is needed
            raise UserError("it does not fit")
        run, memory = plan_run(choice, spec, hardware, times(choice))
        memory.check(resumed=False)
        found[_values(choice)] = run, memory
        return run

    def lower_bound(choice: Config) -> float:
        used = hardware.used(choice)
        layout = step_layout(choice, used.machine.card, used.share(choice))
        return least_period(spec, used.machine, layout, device_limit=used.tensor_bytes, measured=times(choice))

    def missing(choice: Config) -> tuple[int, int]:
        memory = least_memory(choice, spec, hardware)
        return max((gpu.missing for gpu in memory.gpus), default=0), memory.host.missing

    if not is_automatic(config):
        return config, None
    try:
        best = search_auto(config, hardware.devices, plan, hardware.process[1], lower_bound)
        return best, found[_values(best)]
    except UserError:
        few, more = (_choices(config, hardware.devices, hardware.process[1], few=few) for few in (True, False))
        return min(filter(hardware.divisible, (*few, *more)), key=missing, default=few[0]), None


def search_auto(
    config: Config,
    devices: int,
    plan: Callable[[Config], RunPlan],
    processes: int = 1,
    lower_bound: Callable[[Config], float] = lambda choice: 0.0,
) -> Config:
    """The config with the numbers whose plan has the shortest step, in place of "auto".

    `devices` are those of each of the `processes`, and each of them has a group of devices at least.

    `plan` makes the plan of a config with numbers, and raises UserError if it does not fit; `lower_bound` gives a lower
    bound of its period, and choices that it rules out are not planned. Among about equally fast
    choices the first wins: few groups of devices (with LoRA, whose gradients are small, many), few rounds, and large
    micro-batches, one more of them than devices, so that handing over between devices costs nothing. If none of them
    fits, the first choice in other numbers of rounds that fits is taken, and if nothing fits, the UserError of the
    smallest choice is raised.
    """
    refusals: dict[int, UserError] = {}

    def period(choice: Config, most: float | None = None) -> float | None:
        """The period of a choice; None if it does not fit, or if its lower bound is `most` or more."""
        try:
            ruled_out = most is not None and lower_bound(choice) >= most
            return None if ruled_out else plan(choice).estimate.period
        except UserError as error:
            refusals[choice.train.sequences] = error
            return None

    best: tuple[float, Config] | None = None
    for choice in _choices(config, devices, processes):
        if best is not None and choice.train.micro_batches > MICRO_BATCHES:
            break
        found = period(choice, best and best[0])
        if found is not None and (best is None or found < best[0] * (1 - WORTH)):
            best = found, choice
    if best is not None:
        return best[1]
    for choice in _choices(config, devices, processes, few=False):
        if period(choice) is not None:
            return choice
    raise refusals[min(refusals)]


def with_values(resolved: Resolved, config: Config, origin: str) -> Resolved:
    """`resolved` with the numbers of `config`, which come from `origin`."""
    pairs = zip(AUTOMATIC, _values(resolved.config), _values(config), strict=True)
    origins = {key: origin for key, old, new in pairs if old != new}
    return replace(resolved, config=config, origins={**resolved.origins, **origins})


def recorded(config: Config, run: Config) -> Config:
    """The config with the numbers of a resumed run in place of "auto": they do not change during a run."""
    pairs = zip(_values(config), _values(run), strict=True)
    return _with(config, *(old if new == "auto" else new for new, old in pairs))


def divisors(number: int) -> list[int]:
    """All divisors, the largest first."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)


def _values(config: Config) -> tuple[Any, Any, Any]:
    return config.train.micro_batch_size, config.engine.round_size, config.engine.replicas


def _with(config: Config, rows: int, round_size: int | None, replicas: int) -> Config:
    train = config.train.model_copy(update={"micro_batch_size": rows})
    engine = config.engine.model_copy(update={"round_size": round_size, "replicas": replicas})
    return config.model_copy(update={"train": train, "engine": engine})


def _choices(config: Config, devices: int, processes: int, *, few: bool = True) -> list[Config]:
    """All choices in ROUNDS: few groups and few rounds first, then large micro-batches; last, those that leave devices
    idle. Without `few`, those in other numbers of rounds.
    """
    rows, size, replicas = _values(config)
    total = config.train.global_batch_size
    groups = [replicas]
    if replicas == "auto":  # a power of two divides more numbers of micro-batches; processes then differ by a group
        least = [processes * n for n in reversed(divisors(devices))]
        groups = sorted({*least, *(1 << (n - 1).bit_length() for n in least)} if processes > 1 else least)
    if config.adapters is not None:
        groups.reverse()
    choices: list[tuple[int, int | None, int]] = []
    numbers = ROUNDS if few else [n for n in reversed(divisors(total)) if n not in ROUNDS]
    for n_groups in groups:
        for rounds in numbers if size == "auto" else (1,) if few else ():
            for n in divisors(total) if rows == "auto" else [rows]:
                count = total // n
                if size == "auto" and count % (n_groups * rounds) == 0:
                    choices.append((n, None if rounds == 1 else count // (n_groups * rounds), n_groups))
                elif size != "auto" and count % (n_groups * (size or 1)) == 0:
                    choices.append((n, size, n_groups))
    if not choices and few:
        keys = {"engine.round_size": size, "engine.replicas": replicas}
        given = " and ".join(f"{key} = {value}" for key, value in keys.items() if value not in ("auto", None, 1))
        multiple = prod(number for number in (rows, size, replicas) if isinstance(number, int))
        raise UserError(
            f"{given} does not divide any number of micro-batches that {total} sequences allow: set "
            f"train.global_batch_size to a multiple of {multiple}"
        )

    def order(choice: tuple[int, int | None, int]) -> tuple[bool, int]:
        n, size, n_groups = choice
        count = total // n
        return count > MICRO_BATCHES, max(0, processes * devices + n_groups - (size * n_groups if size else count))

    choices.sort(key=order)
    return [_with(config, *choice) for choice in choices]
