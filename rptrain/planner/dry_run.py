"""`rptrain --dry-run`: what `rptrain plan` refuses, without the plan."""

from rptrain.config.resolve import Resolved
from rptrain.planner.machine_flags import MachineFlags
from rptrain.planner.preflight import config_error
from rptrain.planner.refusals import Refusal
from rptrain.planner.report import report

KEYS = {"host memory": "engine.host_limit", "GPU memory": "engine.vram_limit", "disk space": "save.output_dir"}


def check_run(resolved: Resolved) -> None:
    """Plan the run and check what training checks before it starts. Raises ConfigError with all mistakes, and advice if
    the run does not fit.
    """
    found = report(resolved, MachineFlags())
    too_small = list(found.memory.problems(resumed=found.hardware.saved > 0))
    if found.problem is not None:
        too_small.append(("GPU memory", found.problem))
    refusals = [Refusal(KEYS[kind], text, resolved.place(KEYS[kind])) for kind, text in too_small]
    if not found.fits:
        raise config_error([*found.readiness.refusals, *refusals], str(found.advice).splitlines())
