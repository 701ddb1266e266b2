"""Plans of the recipes on machines with RTX 4090 GPUs. Nothing is measured.

python -m benchmarks.recipes [RECIPE ...] prints a table for docs/benchmarks/plans.md. A cell has the first change that
makes the recipe fit, if it does not fit as it is, and the estimated tokens per second.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rptrain.config import recipes
from rptrain.config.resolve import resolve
from rptrain.machine.flags import MachineFlags
from rptrain.planner.report import PlanReport, report

GPUS, HOSTS = (1, 4, 8), ("64GiB", "128GiB", "256GiB")


def table(names: Sequence[str]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| recipe | GPUs | {' | '.join(HOSTS)} |"
    yield "| --- " * (len(HOSTS) + 2) + "|"
    for name in names:
        for gpus in GPUS:
            found = (planned(name, MachineFlags(gpus=gpus, card="rtx4090", host=host)) for host in HOSTS)
            yield f"| {name} | {gpus} | {' | '.join(map(_cell, found))} |"


def planned(name: str, flags: MachineFlags) -> PlanReport:
    """The plan of a recipe with the preset that its second line names."""
    preset = re.search(r"model\.path=\S+", recipes.text(name))
    assert preset, f"{name}: no preset"
    return report(resolve(Path(f"{name}.toml"), [preset[0]], recipes.text(name)), flags)


def _cell(found: PlanReport) -> str:
    assert found.run is not None, found.problem
    speed = found.config.tokens / found.run.estimate.period
    if found.fits:
        return f"{speed:,.0f}"
    if found.advice.remedies:
        first = found.advice.remedies[0]
        return f"{_short(' '.join(map(str, first.changes)))}: {first.speed:,.0f}"
    return _short(str(found.advice).splitlines()[1].removeprefix("- ").partition(" (")[0])


def _short(overrides: str) -> str:
    return re.sub(r"\b(train|optim|lora|engine|model|data)\.", "", overrides)


if __name__ == "__main__":
    for line in table(sys.argv[1:] or recipes.names()):
        print(line, flush=True)
