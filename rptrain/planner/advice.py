"""Advice for a config that does not fit: changes that make it fit, and the memory with which it fits without them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from rptrain.config.schema import Config
from rptrain.config.types import format_size
from rptrain.machine.hardware import MARGIN, Gpu, Hardware, installed_for
from rptrain.models.spec import ModelShape
from rptrain.planner.changes import Change, Changes, in_order
from rptrain.planner.ladders import GIB
from rptrain.planner.memory import Kind, MemoryPlan, least_memory, plan_run
from rptrain.planner.remedies import Remedy, RemedySearch, ShapeOf, adapting, most
from rptrain.schedule.plan import Stage
from rptrain.utils.units import format_bytes, format_rate

OTHER_DISK = "make room, or set save.output_dir to another disk"
TIGHT = 1.06  # of the least host memory: what a plan of little memory may take


@dataclass(frozen=True)
class LargerMachine:
    """The memory with which a config fits after some changes, or as it is.

    `host` and `vram`: bytes to install in the host and in each GPU, None if those of the planned machine are enough or
    unknown. `more`: bytes by kind of memory beyond those that there are.
    """

    changes: Changes
    costs: tuple[str, ...]
    host: int | None
    vram: int | None
    more: dict[Kind, int]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the keys that rptrain/planner/report.py describes."""
        sizes = {"host": self.host, "vram": self.vram, "more": self.more}
        return {"changes": values(self.changes), "costs": self.costs, **sizes}


@dataclass(frozen=True)
class Advice:
    """What makes a config fit, the changes that cost least first; the missing bytes of each kind of memory; and
    machines with enough memory. `here`: it is about this machine; `new`: a run that is not resumed.
    """

    remedies: tuple[Remedy, ...]
    missing: dict[Kind, int]
    machines: tuple[LargerMachine, ...] = ()
    here: bool = False
    new: bool = True

    def __str__(self) -> str:
        """Lines without indentation; empty if nothing is missing."""
        if not self.missing:
            return ""
        title = "what makes it fit:"
        if not self.remedies:
            only_disk = [*self.missing] == ["disk space"]
            title = f"{'' if only_disk else 'no settings make it fit: '}it needs {_more(self.missing)}"
            title += f": {OTHER_DISK}" if only_disk and self.new else ""
        lines = [*map(_remedy, self.remedies), *filter(None, map(self._machine, self.machines))]
        return "\n".join((title, *(f"- {line}" for line in lines)))

    def _machine(self, machine: LargerMachine) -> str:
        """The overrides and the memory, and in parentheses what they cost; empty if they say nothing new."""
        sizes = (("--host", machine.host), ("--vram", machine.vram))
        memory = " ".join(f"{flag} {format_size(size)}" for flag, size in sizes if size is not None)
        costs = [*machine.costs] or ["as it is"]
        if self.here:
            memory = "" if machine.more == self.missing and not self.remedies else _more(machine.more)
            costs += [OTHER_DISK] if "disk space" in machine.more and self.new else []
        if not memory:
            return ""
        overrides = " ".join(map(str, machine.changes))
        between = "" if not overrides else " and " if self.here else " "
        return f"{overrides}{between}{memory} ({'; '.join(costs)})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the keys that rptrain/planner/report.py describes."""
        remedies = [
            {"changes": values(r.changes), "saves": r.saved, "costs": r.costs, "tokens_per_second": r.speed}
            for r in self.remedies
        ]
        return {"remedies": remedies, "missing": self.missing, "machines": [m.to_dict() for m in self.machines]}


def values(changes: Changes) -> dict[str, Any]:
    """The values of changes by key."""
    return {change.key: change.value for change in changes}


def _remedy(remedy: Remedy) -> str:
    """The overrides, and in parentheses what they cost and save."""
    saved = [f"{format_bytes(nbytes)} of {kind}" for kind, nbytes in remedy.saved.items() if nbytes > 0]
    parts = [*remedy.costs]
    if saved:
        parts.append(f"saves {' and '.join(saved)}")
    if remedy.speed is not None:
        parts.append(f"about {format_rate(remedy.speed)}")
    return f"{' '.join(map(str, remedy.changes))} ({'; '.join(parts)})"


def _more(missing: dict[Kind, int]) -> str:
    return " and ".join(f"{format_bytes(nbytes)} more {kind}" for kind, nbytes in missing.items())


def advise(
    config: Config,
    spec: ModelShape,
    hardware: Hardware,
    before: MemoryPlan | None = None,
    shape_of: ShapeOf | None = None,
    stages: Sequence[Stage] | None = None,
) -> Advice:
    """Advice for a config without "auto". `before` is the memory of its plan, which has these `stages`, or, without a
    plan, the least memory.

    `shape_of`: the model as another config trains it, or UserError; without it, adapters and a quantized base are not
    proposed.
    """
    if before is None:
        before = least_memory(config, spec, hardware)
        if not any(place.missing for place in before.gpus):
            run, before = plan_run(config, spec, hardware)
            stages = run.plan.stages
    missing = most(before, "missing")
    if not missing:
        return Advice((), missing)
    search = RemedySearch(config, spec, hardware, before, shape_of, stages)
    remedies = search.remedies()
    tried: list[Changes] = [()]
    if "host memory" in missing and all(adapting(remedy.changes) for remedy in remedies):
        tried.append(search.states())
    if not remedies and [*missing] != ["disk space"]:
        tried.append(search.method())
    as_is, *others = (_machine(search, changes, hardware) for changes in dict.fromkeys(tried))
    smaller = (machine for machine in others if sum(machine.more.values()) < sum(as_is.more.values()))
    return Advice(tuple(remedies), missing, (as_is, *smaller), hardware.here, not hardware.saved)


def _machine(search: RemedySearch, changes: Changes, hardware: Hardware) -> LargerMachine:
    """The memory for a config with these changes."""
    case = search.case(changes)
    assert case is not None
    config, spec = case.config, case.spec
    least = least_memory(config, spec, case.hardware)
    vram = max((ceil((gpu.total + MARGIN) / GIB) * GIB for gpu in least.gpus), default=0)
    enough = all(not gpu.missing for gpu in least.gpus)

    def larger(gpu: Gpu) -> Gpu:
        return gpu if enough else replace(gpu, tensor_bytes=vram - MARGIN - gpu.context)

    tight = None if hardware.host is None else int(TIGHT * least.host.total)
    roomy = replace(case.hardware, host=tight, gpus=tuple(map(larger, case.hardware.gpus)))
    _, memory = plan_run(config, spec, roomy)
    needs = most(memory, "total")
    host, gpu = needs["host memory"], max((one.most for one in hardware.gpus), default=0)
    limits = []
    if config.engine.host_limit is not None and host > config.engine.host_limit:
        limits.append(Change("engine.host_limit", ceil(host / GIB) * GIB))
    if config.engine.vram_limit is not None and not enough:
        limits.append(Change("engine.vram_limit", vram))
    more: dict[Kind, int] = {
        "host memory": host - (hardware.host_most or host),
        "GPU memory": 0 if enough else needs["GPU memory"] - min(one.most for one in hardware.gpus),
        "disk space": 0 if memory.disk is None else memory.disk.missing,
    }
    changes = in_order((*changes, *limits))
    return LargerMachine(
        changes,
        tuple(change.cost(search.config) for change in changes),
        installed_for(host, hardware.devices) if host > (hardware.host_most or host) else None,
        vram if not enough and vram > gpu else None,
        {kind: nbytes for kind, nbytes in more.items() if nbytes > 0},
    )
