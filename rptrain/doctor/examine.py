"""Everything that the doctor looks at."""

from pathlib import Path

from rptrain.doctor import gpu, host
from rptrain.doctor.checks import Check


def examine(runs: Path) -> list[Check]:
    """Looks at everything, in a few seconds. `runs` is the folder of runs, whose disk counts; it need not be there."""
    gpus = gpu.examine()
    return [*gpus, *host.examine(runs, gpus=any("device" in one.figures for one in gpus))]
