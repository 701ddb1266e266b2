"""The values of each key that save memory, the smallest change first; each list begins with no change."""

from collections.abc import Iterator
from typing import NamedTuple

from rptrain.config.schema import Config
from rptrain.machine.hardware import Hardware
from rptrain.planner.auto import divisors
from rptrain.planner.changes import LIMITS, Change, Changes
from rptrain.planner.memory import Kind

SHORTEST = 128  # tokens: shorter sequences are not proposed
GIB = 1 << 30


class _Layout(NamedTuple):
    """How a step is divided."""

    fewer: bool  # replicas than the config has
    order: int  # 0: as few rounds as possible
    rows: int  # sequences per micro-batch
    rounds: int | None  # engine.round_size
    replicas: int
    each: int  # micro-batches of a replica


class Ladders:
    """The values for a config without "auto". `missing`: the kinds of memory that are too small; `busy`: the devices of
    a process that the config keeps busy.
    """

    def __init__(self, config: Config, hardware: Hardware, missing: dict[Kind, int], busy: int) -> None:
        self._config, self._hardware, self._missing, self._busy = config, hardware, missing, busy

    def raises(self) -> Iterator[tuple[str, int]]:
        """Limits of the config that keep it from memory that exists, and what they can be raised to."""
        engine, hardware = self._config.engine, self._hardware
        vram = min((gpu.most for gpu in hardware.gpus), default=0)
        for key, limit, exists in (
            ("engine.host_limit", engine.host_limit, hardware.host_most or 0),
            ("engine.vram_limit", engine.vram_limit, vram),
        ):
            whole = exists // GIB * GIB or exists
            if limit is not None and limit < whole and LIMITS[key] in self._missing:
                yield key, whole

    def _grid(self, changes: Changes, idle: bool) -> list[_Layout]:
        """The layouts that are possible with the changes, those that cost least first."""
        config, processes = self._config, self._hardware.process[1]  # each of them needs a replica
        values = {change.key: change.value for change in changes}
        total = values.get("train.global_batch_size", config.train.global_batch_size)
        size, found = config.engine.round_size, []
        assert size != "auto"
        for replicas in dict.fromkeys((config.replicas, processes)):
            for rows in (n for n in divisors(total) if n <= config.train.sequences):
                each, rest = divmod(total // rows, replicas)
                if rest or not each:
                    continue
                whole = () if size else (None,)
                smaller = [n for n in divisors(each) if n < (size + 1 if size else each)]
                for order, rounds in enumerate((*whole, *smaller)):
                    at_once = (rounds or each) * replicas // processes
                    if idle or min(at_once, self._hardware.devices) >= self._busy:
                        found.append(_Layout(replicas != config.replicas, order, rows, rounds, replicas, each))
        return sorted(found, key=lambda one: (one.fewer, one.order, -one.rows))

    def layouts(self, changes: Changes, idle: bool) -> list[Changes]:
        """Micro-batches, rounds and replicas that are possible with the changes."""
        return [self._of(one) for one in self._grid(changes, idle)]

    def corners(self, changes: Changes, idle: bool) -> list[Changes]:
        """The layouts of which one takes the least memory: in the fewest rounds, which need smaller sums of gradients,
        or in the smallest, which have fewer activations.
        """
        found, grid = list[Changes](), self._grid(changes, idle)
        for replicas in {one.replicas for one in grid}:
            of_these = [one for one in grid if one.replicas == replicas]
            fewest = min(of_these, key=lambda one: (one.order, one.rows))
            smallest = min(of_these, key=lambda one: ((one.rounds or one.each) * one.rows, one.rows))
            found += [self._of(one) for one in (fewest, smallest)]
        return list(dict.fromkeys(found))

    def _of(self, layout: _Layout) -> Changes:
        config = self._config
        return tuple(
            Change(key, new)
            for key, new, old in (
                ("train.micro_batch_size", layout.rows, config.train.sequences),
                ("engine.round_size", layout.rounds, config.engine.round_size),
                ("engine.replicas", layout.replicas, config.replicas),
            )
            if new != old
        )

    def moments(self) -> list[Changes]:
        smaller = {"fp32": ("bf16", "int8"), "bf16": ("int8",), "int8": ()}[self._config.optim.moments]
        return [(), *((Change("optim.moments", kind),) for kind in smaller if self._config.model.dtype != "float64")]

    def updates(self) -> list[Changes]:
        return [(), (Change("optim.update", "sync"),)] if self._config.optim.update == "async" else [()]

    def batches(self, idle: bool) -> list[Changes]:
        """Halves of the batch, as long as every device has a sequence."""
        least = 1 if idle else self._busy * self._hardware.process[1]
        total = self._config.train.global_batch_size
        halves = [total >> n for n in range(1, total.bit_length())]
        return [(), *((Change("train.global_batch_size", n),) for n in halves if n >= least)]

    def lengths(self) -> list[Changes]:
        length = self._config.data.max_length
        halves = [1 << n for n in reversed(range((length - 1).bit_length())) if SHORTEST <= 1 << n < length]
        return [(), *((Change("data.max_length", n),) for n in halves)]
