"""Advice for a config that does not fit: changes of one key or of two, tried with the planner."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from math import ceil, prod
from typing import Any, Literal

from pydantic import ValidationError

from rptrain.config.schema import Config
from rptrain.config.types import format_size
from rptrain.models.spec import ModelShape
from rptrain.models.weights.file_backed import file_backed_units
from rptrain.planner.auto import divisors
from rptrain.planner.hardware import Hardware
from rptrain.planner.memory import MemoryPlan, least_memory, plan_run, saves
from rptrain.runs.run_dir import changed
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes

SHORTEST = 128  # tokens: shorter sequences are not proposed
GIB = 1 << 30
SWITCH = 2.0  # weight of a change of `optim.update`, compared with dividing another key by this factor
MOMENTS = {"bf16": 2.0, "int8": 4.0}  # weight of `optim.moments`
ADAPTERS = 16.0  # weight of `train.method`
QUANTIZED = 4.0  # weight of `lora.base`
MAPPED = 8.0  # weight of `model.hold`: a disk may be slow


@dataclass(frozen=True)
class Change:
    """A new value for a key."""

    key: str
    value: Any
    size: float = 1.0  # the ratio of the old and the new value, at least 1

    def __str__(self) -> str:
        size = self.key in ("engine.vram_limit", "engine.host_limit")
        return f"{self.key} = {json.dumps(format_size(self.value) if size else self.value)}"


@dataclass(frozen=True)
class Remedy:
    """Changes that together make a run fit, and the bytes that they save in each place that was too small."""

    changes: tuple[Change, ...]
    saved: dict[str, int]

    def __str__(self) -> str:
        several = len(self.changes) > 1
        text = f"{' and '.join(map(str, self.changes))} {'fit' if several else 'fits'}"
        saved = [f"{format_bytes(nbytes)} of {kind}" for kind, nbytes in self.saved.items() if nbytes > 0]
        return f"{text} and {'save' if several else 'saves'} {', '.join(saved)}" if saved else text


@dataclass(frozen=True)
class Advice:
    """Single changes, the smallest first, or otherwise one pair; and the missing bytes of each kind of memory."""

    remedies: tuple[Remedy, ...]
    missing: dict[str, int]

    def __str__(self) -> str:
        """Lines without indentation; empty if nothing is missing."""
        if not self.missing:
            return ""
        if self.remedies:
            return "\n".join(["what makes it fit:", *(f"- {remedy}" for remedy in self.remedies)])
        needs = " and ".join(f"{format_bytes(nbytes)} more {name}" for name, nbytes in self.missing.items())
        if [*self.missing] == ["disk space"]:
            return f"it needs {needs}"
        return f"no change of one or two settings makes it fit: it needs {needs}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a remedy has its `changes` by key and `saves` in bytes by place; `missing` is by place."""
        remedies = [{"changes": {c.key: c.value for c in r.changes}, "saves": r.saved} for r in self.remedies]
        return {"remedies": remedies, "missing": self.missing}


def with_value(config: Config, key: str, value: Any) -> Config | None:
    """The config with one key changed; None if the value is not valid."""
    section, name = key.split(".")
    values = config.model_dump()
    values[section] = {**(values[section] or {}), name: value}
    try:
        return Config.model_validate(values)
    except ValidationError:
        return None


def advise(
    config: Config,
    spec: ModelShape,
    hardware: Hardware,
    before: MemoryPlan | None = None,
    shape_of: Callable[[Config, Hardware], ModelShape] | None = None,
) -> Advice:
    """Advice for a config without "auto". `before` is the memory of its plan or, without a plan, the least memory.

    `shape_of`: the model as another config trains it, or UserError; without it, adapters and a quantized base are not
    proposed.
    """
    if before is None:
        before = least_memory(config, spec, hardware)
        if not any(place.missing for place in before.gpus):
            before = plan_run(config, spec, hardware)[1]
    return _Adviser(config, spec, hardware, before, shape_of).advice()


class _Adviser:
    def __init__(
        self,
        config: Config,
        spec: ModelShape,
        hardware: Hardware,
        before: MemoryPlan,
        shape_of: Callable[[Config, Hardware], ModelShape] | None,
    ) -> None:
        self._config, self._spec, self._hardware, self._shape_of = config, spec, hardware, shape_of
        self._missing = {kind: nbytes for kind, nbytes in _most(before, "missing").items() if nbytes}
        self._totals = _most(before, "total")

    def advice(self) -> Advice:
        ways = [list(way) for way in self._ways()] if self._missing else []
        singles = [remedy for way in ways if (remedy := self._first([(change,) for change in way]))]
        if self._missing and self._shape_of is not None:
            singles += [remedy for way in self._methods() if (remedy := self._first([way]))]
        if singles:
            singles.sort(key=lambda remedy: prod(change.size for change in remedy.changes))
            return Advice(tuple(singles), self._missing)
        pairs = [pair for two in combinations(ways, 2) for pair in product(*two)]
        pair = self._first(sorted(pairs, key=lambda pair: pair[0].size * pair[1].size))
        return Advice((pair,) if pair else (), self._missing)

    def _first(self, candidates: Iterable[tuple[Change, ...]]) -> Remedy | None:
        """The first of the candidates that fits. A resumed run cannot change every setting."""
        for changes in candidates:
            config: Config | None = self._config
            for change in changes:
                config = with_value(config, change.key, change.value) if config else None
            if config is None or (self._hardware.saved and changed(self._config, config)):
                continue
            hardware = self._hardware.limited(config.engine)
            if not hardware.divisible(config):
                continue
            try:
                spec = self._spec_of(changes, config, hardware)
            except UserError:  # the model cannot be trained that way
                continue
            if least_memory(config, spec, hardware).fits:  # otherwise a search for a plan is not needed
                memory = plan_run(config, spec, hardware)[1]
                if memory.fits:
                    after = _most(memory, "total")
                    return Remedy(changes, {kind: self._totals[kind] - after[kind] for kind in self._missing})
        return None

    def _spec_of(self, changes: tuple[Change, ...], config: Config, hardware: Hardware) -> ModelShape:
        if self._shape_of is None or not any(change.key in ("train.method", "lora.base") for change in changes):
            return self._spec
        return self._shape_of(config, hardware)

    def _methods(self) -> Iterator[tuple[Change, ...]]:
        """Adapters in place of training all weights, and a base of 4 bits."""
        quantized = Change("lora.base", "nf4", QUANTIZED)
        if self._config.adapters is None:
            adapters = Change("train.method", "lora", ADAPTERS)
            yield (adapters,)
            yield (adapters, quantized)
        elif self._config.adapters.base == "bf16":
            yield (quantized,)

    def _ways(self) -> Iterator[Iterable[Change]]:
        """The values of each key that could help, the smallest change first."""
        train, save, engine = self._config.train, self._config.save, self._config.engine
        for key, kind, limit, most in (
            (
                "engine.vram_limit",
                "GPU memory",
                engine.vram_limit,
                min((g.most for g in self._hardware.gpus), default=0),
            ),
            ("engine.host_limit", "host memory", engine.host_limit, self._hardware.host_most or 0),
        ):
            needed = ceil(self._totals.get(kind, 0) / GIB) * GIB
            if limit is not None and kind in self._missing and needed <= most:
                yield [Change(key, needed, needed / limit)]
        if "disk space" in self._missing:
            kept = save.save_total_limit or saves(self._config) or 1
            yield [Change("save.save_total_limit", n, kept / n) for n in range(kept - 1, 0, -1)]
        yield [Change("train.micro_batch_size", n, train.sequences / n) for n in _divisors(train.sequences)]
        size, each = self._config.round_size, train.micro_batches // self._config.replicas
        yield [Change("engine.round_size", n, size / n) for n in _divisors(each) if n < size]
        processes = self._hardware.process[1]  # each of them needs a replica
        if self._config.replicas > processes:
            yield [Change("engine.replicas", processes, self._config.replicas / processes)]
        if self._config.optim.update == "async":
            yield [Change("optim.update", "sync", SWITCH)]
        if self._config.optim.moments == "fp32":
            yield [Change("optim.moments", kind, size) for kind, size in MOMENTS.items()]
        if self._config.model.hold == "memory" and file_backed_units(self._spec):
            yield [Change("model.hold", "map", MAPPED)]
        total, length = train.global_batch_size, self._config.data.max_length
        yield [Change("train.global_batch_size", total // n, n) for n in _powers(total) if total % n == 0]
        shorter = [n for n in reversed(_powers(length)) if SHORTEST <= n < length]
        yield [Change("data.max_length", n, length / n) for n in shorter]


def _most(memory: MemoryPlan, what: Literal["missing", "total"]) -> dict[str, int]:
    """Missing bytes by kind of memory; for GPUs, of the GPU with the most."""
    found: dict[str, int] = {}
    for place in memory.places:
        found[place.kind] = max(found.get(place.kind, 0), getattr(place, what))
    return found


def _divisors(number: int) -> list[int]:
    """The divisors below the number, the largest first."""
    return divisors(number)[1:]


def _powers(most: int) -> list[int]:
    """Powers of two from 2 up to `most`."""
    return [2**n for n in range(1, most.bit_length())]
