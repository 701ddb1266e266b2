"""All checks of the doctor."""

from pathlib import Path

from rptrain.doctor import gpu, host
from rptrain.doctor.checks import Check


def examine(runs: Path) -> list[Check]:
    """Runs all checks, in a few seconds. `runs`: the folder of runs, whose disk is checked; it need not exist."""
    gpus = gpu.examine()
    return [*gpus, *host.examine(runs, gpus=any("device" in one.figures for one in gpus))]
