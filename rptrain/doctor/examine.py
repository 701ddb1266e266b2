"""All checks of the doctor."""

from pathlib import Path

from rptrain.doctor import gguf, gpu, host, kernels, links, products
from rptrain.doctor.checks import Check
from rptrain.utils.phases import phase


def examine(runs: Path) -> list[Check]:
    """Runs all checks, in a few seconds. `runs`: the folder of runs, whose disk is checked; it need not exist."""
    used = products.used()
    with phase("compiling a kernel", unit=""):
        compiled = kernels.examine()
    with phase("measuring matrix products", unit=""):
        rates = products.examine(used, [kernels.runs(one) for one in compiled])
    gpus = gpu.examine()
    with phase("measuring transfers", unit=""):
        together = links.examine(idle=not any("used" in one.figures for one in rates))
    return [
        *gpus,
        *gpu.models(),
        *compiled,
        *together,
        *rates,
        *host.examine(runs, gpus=any("device" in one.figures for one in gpus)),
        gguf.examine(),
    ]
