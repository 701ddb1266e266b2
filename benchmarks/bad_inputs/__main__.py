"""Run the program on about 900 bad and hostile inputs, and report those that it does not handle well.

python -m benchmarks.bad_inputs [--area AREA] [--case TEXT] [--jobs N] [--out FILE]

Each case makes its files in a temporary folder and runs one command. A case fails if the command ends with another
exit code than expected, shows a traceback or internal names, prints control characters, overlong lines or too many
lines, does not name what is wrong, takes more than 20 s or 2 GiB, or changes a file that is not its output. Prints the
failures and a summary, and writes all results as JSON to FILE. Exits with status 1 if a case fails.

Commands run in forks of a process that has imported the program (`server.py`), because importing torch takes seconds. A
few cases use a process of their own. The whole set takes about five minutes on two cores.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bad_inputs.areas import AREAS, all_cases
from benchmarks.bad_inputs.run import Result, run_all


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.bad_inputs",
        description="Run the program on bad inputs, and report what it handles badly.",
    )
    parser.add_argument("--area", choices=AREAS, help="run the cases of this area")
    parser.add_argument("--case", default="", help="run the cases whose number or name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error("--jobs must be at least 1")
    cases = [
        case
        for case in all_cases()
        if given.area in (None, case.area) and (given.case in case.name or given.case == str(case.number))
    ]
    if not cases:
        parser.error("no case matches")
    began = time.monotonic()
    with TemporaryDirectory(prefix="bad-inputs-") as folder:
        results = run_all(cases, Path(folder), min(given.jobs, len(cases)), tell)
    if given.out:
        given.out.write_text(json.dumps([result.to_dict() for result in results], indent=1) + "\n")
    print(summary(results, time.monotonic() - began))
    return int(any(result.faults for result in results))


def tell(result: Result) -> None:
    if result.faults:
        case = result.case
        print(f"FAILED {case.number} {case.area}: {case.name!r}: {'; '.join(result.faults)}", flush=True)


def summary(results: list[Result], seconds: float) -> str:
    cases = Counter(result.case.area for result in results)
    failed = Counter(result.case.area for result in results if result.faults)
    lines = [f"{area:<12} {count:4} cases, {failed[area]:3} failed" for area, count in cases.items()]
    return "\n".join([*lines, f"{len(results)} cases, {failed.total()} failed, {seconds:.0f} s"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
