"""`rptrain doctor`."""

import json

from rptrain.cli.complete import RUNS
from rptrain.cli.exits import exit_codes
from rptrain.cli.options import JsonArray, RunsFolder


def doctor(
    folder: RunsFolder = RUNS,
    as_json: JsonArray = False,
) -> None:
    """Check this machine: GPUs, their links and rates, memory, compiler and disk.

    The rates of products are kept, and later plans use them.
    """
    with exit_codes():
        from rptrain.doctor.checks import lines
        from rptrain.doctor.examine import examine

        found = examine(folder)
        if as_json:
            print(json.dumps([finding.to_dict() for finding in found], indent=2))
        else:
            print("\n".join(lines(found)))
