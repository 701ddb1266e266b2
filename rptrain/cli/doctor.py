"""`rptrain doctor`."""

import json

from rptrain.cli.complete import RUNS
from rptrain.cli.exits import exit_codes
from rptrain.cli.options import JsonArray, RunsFolder
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.phases import phase


def doctor(
    folder: RunsFolder = RUNS,
    as_json: JsonArray = False,
) -> None:
    """Check the GPUs, the memory, the compiler and the disk.

    Measures how fast the GPUs multiply matrices and transfer data. Later plans use these rates.
    """
    with exit_codes():
        with PhaseDisplay(shown=not as_json), phase("examining the machine", unit=""):
            from rptrain.doctor.checks import lines
            from rptrain.doctor.examine import examine

            found = examine(folder)
        if as_json:
            print(json.dumps([finding.to_dict() for finding in found], indent=2))
        else:
            print("\n".join(lines(found)))
