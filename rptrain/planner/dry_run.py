"""`rptrain --dry-run`: what `rptrain plan` refuses, without the plan."""

import logging

from rptrain.config.resolve import DEFAULT, Resolved
from rptrain.machine.flags import MachineFlags
from rptrain.planner.report import report
from rptrain.preflight.checks import Refusal
from rptrain.preflight.machine_and_model import config_error

log = logging.getLogger(__name__)

KEYS = {"host memory": "engine.host_limit", "GPU memory": "engine.vram_limit", "disk space": "save.output_dir"}
HEADING = "the run cannot start, for {count} reasons"


def check_run(resolved: Resolved, *, warn: bool = True) -> None:
    """Plan the run and check what training checks before it starts. Logs warnings, unless `warn` is false.

    Raises ConfigError with all mistakes, with what does not fit, and with advice for that.
    """
    found = report(resolved, MachineFlags())
    for warning in found.warnings if warn else ():
        log.warning(warning)
    too_small = list(found.memory.problems(resumed=found.hardware.saved > 0))
    if found.problem is not None:
        too_small.append(("GPU memory", found.problem))
    refusals = [Refusal(KEYS[kind], text, _place(resolved, KEYS[kind])) for kind, text in too_small]
    if refusals:
        advice = str(found.advice).splitlines()
        raise config_error([*found.checks.refusals, *refusals], advice, heading=HEADING)
    if not found.fits:
        raise config_error(found.checks.refusals)


def _place(resolved: Resolved, key: str) -> str:
    """Where a limit is set, or else the machine, whose memory or disk is the limit."""
    return "this machine" if resolved.origins.get(key, DEFAULT) == DEFAULT else resolved.place(key)
