"""The checks of this machine, which the helper process makes."""

from dataclasses import replace
from pathlib import Path

from rptrain.doctor.checks import Check


def checks(runs: Path) -> list[Check]:
    """The checks of `rptrain doctor`, without their figures."""
    from rptrain.doctor.examine import examine

    return [replace(check, figures={}) for check in examine(runs)]
