"""Search for the changes that make a config fit, those that cost least in learning and speed first.

Costs are lexicographic, in the order of `changes.ORDER`: a change is made only where no cheaper ones fit. Lower bounds
of the memory decide (memory.least_memory); a combination is planned once it passes them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from math import ceil
from typing import Literal

from rptrain.config.schema import Config
from rptrain.machine.hardware import Hardware
from rptrain.models.spec import ModelShape
from rptrain.models.weights.file_backed import file_backed_units
from rptrain.planner.changes import LIMITS, Change, Changes, in_order, with_changes
from rptrain.planner.ladders import GIB, Ladders
from rptrain.planner.memory import Kind, MemoryPlan, least_memory, plan_run, saves
from rptrain.runs.folder.run_dir import changed
from rptrain.schedule.plan import Stage
from rptrain.utils.errors import UserError

ShapeOf = Callable[[Config, Hardware], ModelShape]


@dataclass(frozen=True)
class Case:
    """A changed config, the model as it trains it, and the hardware with its limits."""

    config: Config
    spec: ModelShape
    hardware: Hardware


@dataclass(frozen=True)
class Remedy:
    """Changes that together make a run fit, those that cost least first.

    `saved`: the bytes that they save in each kind of memory that was too small. `speed`: estimated tokens per second;
    None for CPU workers.
    """

    changes: Changes
    saved: dict[str, int]
    costs: tuple[str, ...]
    speed: float | None


class RemedySearch:
    """Finds remedies for a config without "auto" that misses memory. `stages` are those of its plan, if it has one."""

    def __init__(
        self,
        config: Config,
        spec: ModelShape,
        hardware: Hardware,
        before: MemoryPlan,
        shape_of: ShapeOf | None,
        stages: Sequence[Stage] | None,
    ) -> None:
        self.config, self._spec, self._hardware, self._shape_of = config, spec, hardware, shape_of
        self._missing = most(before, "missing")
        self._totals = most(before, "total")
        self._near = stages
        self._specs: dict[frozenset[Change], ModelShape | None] = {frozenset(): spec}
        self._known: dict[frozenset[Change], Case | None] = {}
        self._passed: dict[frozenset[Change], bool] = {}
        self._busy = self._busy_devices(config)
        self._ladders = Ladders(config, hardware, self._missing, self._busy)

    def remedies(self) -> list[Remedy]:
        """Single changes, or else the cheapest combination; beside them adapters, a base of 4 bits and weights on disk.

        Only if nothing fits, some devices stay idle, then limits are raised, and then sequences are shortened.
        """
        raises = [Change(key, size) for key, size in self._ladders.raises()]
        limits: list[Changes] = [(), *((raised,) for raised in raises), *([tuple(raises)] if len(raises) > 1 else [])]
        for shorter, raised, idle in product(self._ladders.lengths(), limits, (False, True)):
            if found := self._at((*shorter, *raised), idle):
                return found
        return []

    def states(self) -> Changes:
        """The smallest optimizer state and exact updates; empty if the config has both, or cannot change them."""
        for moments, update in product(self._ladders.moments()[::-1], self._ladders.updates()[::-1]):
            if self.case(changes := (*moments, *update)):
                return changes
        return ()

    def method(self) -> Changes:
        """The method that takes least host memory: adapters on a base of 4 bits if they are possible."""
        return self._methods(on_disk=False)[-1]

    def case(self, changes: Changes) -> Case | None:
        """The config with the changes; None if it is not valid, or if a resumed run cannot make them."""
        key = frozenset(changes)
        if key not in self._known:
            self._known[key] = self._case(changes)
        return self._known[key]

    def _case(self, changes: Changes) -> Case | None:
        config = with_changes(self.config, changes)
        if config is None or (self._hardware.saved and changed(self.config, config)):
            return None
        hardware = self._hardware.limited(config.engine)
        if not hardware.divisible(config):
            return None
        kind = frozenset(change for change in changes if change.key in ("train.method", "lora.base", "model.hold"))
        if kind not in self._specs:
            try:
                self._specs[kind] = None if self._shape_of is None else self._shape_of(config, hardware)
            except UserError:  # the model cannot be trained that way
                self._specs[kind] = None
        spec = self._specs[kind]
        return None if spec is None else Case(config, spec, hardware)

    def _at(self, fixed: Changes, idle: bool) -> list[Remedy]:
        """Remedies with these changes."""
        found: list[Remedy] = []
        if not fixed:
            found += filter(None, (self._first(way, idle) for way in self._ways(idle)))
            if any(not adapting(remedy.changes) for remedy in found):
                return found
            found.clear()
        for method in self._methods():
            if remedy := self._cheapest((*fixed, *method), idle):
                if rest_of(remedy) not in map(rest_of, found):  # otherwise the method saves nothing that is needed
                    found.append(remedy)
                if len(remedy.changes) <= len(fixed) + len(method):
                    break
        return found

    def _first(self, way: Sequence[Changes], idle: bool) -> Remedy | None:
        for changes in way:
            if self._passes(changes, idle) and (remedy := self._planned(changes)):
                return remedy
        return None

    def _cheapest(self, fixed: Changes, idle: bool) -> Remedy | None:
        """The cheapest combination of batch size, update, optimizer state and layout with the fixed changes."""
        last = self._ladders.updates()[-1], self._ladders.moments()[-1]

        def possible(*chosen: Changes) -> bool:
            """Whether the chosen changes can fit with the values of the others that save most."""
            rest = (change for one in last[len(chosen) - 1 :] for change in one)
            changes = (*fixed, *(change for one in chosen for change in one), *rest)
            return any(self._passes((*changes, *layout), idle) for layout in self._corners(changes, idle))

        for batch in self._ladders.batches(idle):
            if not possible(batch):
                continue
            for update in self._ladders.updates():
                if not possible(batch, update):
                    continue
                for moments in self._ladders.moments():
                    if not possible(batch, update, moments):
                        continue
                    changes = (*fixed, *batch, *update, *moments)
                    for layout in self._layouts(changes, idle):
                        whole = (*changes, *layout)
                        if self._passes(whole, idle) and (remedy := self._planned(whole)):
                            return remedy
        return None

    def _passes(self, changes: Changes, idle: bool) -> bool:
        """Whether the lower bounds fit, and, unless some may be idle, as many devices are busy as before."""
        case = self.case(changes)
        if case is None or not (idle or self._busy_devices(case.config) >= self._busy):
            return False
        key = frozenset(changes)
        if key not in self._passed:
            self._passed[key] = least_memory(case.config, case.spec, case.hardware).fits
        return self._passed[key]

    def _busy_devices(self, config: Config) -> int:
        return min(config.round_size * self._hardware.groups(config), self._hardware.devices)

    def _planned(self, changes: Changes) -> Remedy | None:
        """The remedy of these changes if a short search finds a plan, and then a whole one."""
        case = self.case(changes)
        assert case is not None
        run, memory = plan_run(case.config, case.spec, case.hardware, near=self._near)
        if memory.fits and self._near is not None:
            run, memory = plan_run(case.config, case.spec, case.hardware)
        if not memory.fits:
            return None
        self._near = run.plan.stages
        changes = in_order(self._lowered(change, memory) for change in changes)
        after = most(memory, "total")
        saved = {kind: self._totals[kind] - after[kind] for kind in self._missing}
        costs = tuple(change.cost(self.config) for change in changes)
        return Remedy(changes, saved, costs, case.config.tokens / run.estimate.period if case.hardware.gpus else None)

    def _lowered(self, change: Change, memory: MemoryPlan) -> Change:
        """A raised limit as low as the memory allows."""
        if change.key not in LIMITS:
            return change
        return Change(change.key, min(change.value, ceil(most(memory, "total")[LIMITS[change.key]] / GIB) * GIB))

    def _ways(self, idle: bool) -> Iterator[Sequence[Changes]]:
        """Changes of one key, and adapters with a base of 4 bits."""
        yield from ([(Change(key, most),)] for key, most in self._ladders.raises())
        yield self._keeps[1:]
        for key in ("train.micro_batch_size", "engine.round_size", "engine.replicas"):
            yield [
                layout for layout in self._ladders.layouts((), idle=True) if [change.key for change in layout] == [key]
            ]
        yield self._ladders.moments()[1:]
        yield self._ladders.updates()[1:]
        yield self._ladders.batches(idle)[1:]
        methods = self._methods()[1:]
        yield from [methods] if self.config.adapters is None else ([method] for method in methods)

    @cached_property
    def _keeps(self) -> list[Changes]:
        """Fewer checkpoints: as many as fit, and one."""
        if "disk space" not in self._missing:
            return [()]
        kept = self.config.save.save_total_limit or saves(self.config) or 1

        def too_large(fewer: int) -> bool:
            case = self.case((Change("save.save_total_limit", kept - fewer),))
            memory = case and least_memory(case.config, case.spec, case.hardware)
            return memory is None or memory.disk is None or memory.disk.missing > 0

        fewer = bisect_right(range(1, kept), False, key=lambda n: not too_large(n)) + 1
        return [(), *((Change("save.save_total_limit", n),) for n in dict.fromkeys((kept - fewer, 1)) if 0 < n < kept)]

    def _layouts(self, changes: Changes, idle: bool) -> list[Changes]:
        """Micro-batches, rounds, replicas and kept checkpoints that are possible with the changes."""
        return [(*layout, *keep) for layout in self._ladders.layouts(changes, idle) for keep in self._keeps]

    def _corners(self, changes: Changes, idle: bool) -> list[Changes]:
        """Those of which one takes the least memory."""
        return [(*layout, *self._keeps[-1]) for layout in self._ladders.corners(changes, idle)]

    def _methods(self, *, on_disk: bool = True) -> list[Changes]:
        """Training as it is, with adapters, with a base of 4 bits, and with frozen weights on the disk."""
        lora, found = self.config.adapters, list[Changes]([()])
        adapters = (Change("train.method", "lora"),) if lora is None else ()
        if adapters:
            found.append(adapters)
        if lora is None or lora.base not in ("nf4", "mxfp4"):
            found.append((*adapters, Change("lora.base", "nf4")))
        if on_disk and self.config.model.hold == "memory":
            quantized_here = lora is not None and lora.base in ("nf4", "int8", "fp8")  # files do not hold these
            as_stored = (Change("lora.base", "bf16"),) if quantized_here else ()
            methods = dict.fromkeys([as_stored, adapters])
            with_frozen = (one for one in methods if (case := self.case(one)) and file_backed_units(case.spec))
            found += [(*one, Change("model.hold", "map")) for one in islice(with_frozen, 1)]
        return [method for method in found if self.case(method) is not None]


def adapting(changes: Changes) -> bool:
    """Whether the changes are of what is trained, or of how frozen weights are held."""
    return any(change.key in ("train.method", "lora.base", "model.hold") for change in changes)


def rest_of(remedy: Remedy) -> Changes:
    """The changes except those of the method."""
    return tuple(change for change in remedy.changes if not adapting((change,)))


def most(memory: MemoryPlan, what: Literal["missing", "total"]) -> dict[Kind, int]:
    """Bytes by kind of memory, of GPUs those of the one with the most; without kinds of which nothing is missing."""
    found: dict[Kind, int] = {}
    for place in memory.places:
        if nbytes := getattr(place, what):
            found[place.kind] = max(found.get(place.kind, 0), nbytes)
    return found
