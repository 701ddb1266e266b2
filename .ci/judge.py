"""Run test commands, run once more what failed, and decide: `python .ci/judge.py COMMAND...`, exit status 0 or 1.

A test that fails and then passes is flaky: it is listed with its first failure, and fails nothing. What cannot be
chance fails the gate at once: collection errors, crashes, timeouts, and an exit status that the tests do not explain.
"""

import os
import shlex
import subprocess
import sys
from fnmatch import fnmatchcase
from json import loads
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

# Tests of the engine, of checkpoints, and of whole runs that use both: a failure by chance means a race there.
RACES = (
    "tests/bench/*",
    "tests/benchmarks/*",
    "tests/checkpoint/*",
    "tests/data/test_loss.py",
    "tests/docs/test_outputs.py",
    "tests/engine/*",
    "tests/gpu/*",
    "tests/hub/test_round_trip.py",
    "tests/inference/*",
    "tests/planner/test_auto.py",
    "tests/planner/test_measured_run.py",
    "tests/planner/test_memory.py",
    "tests/planner/test_report.py",
    "tests/planner/test_timings.py",
    "tests/preflight/test_checks.py",
    "tests/runs/test_control.py",
    "tests/runs/test_events.py",
    "tests/runs/test_run_dir.py",
    "tests/test_bad_input.py",
    "tests/test_default_run.py",
    "tests/train/*",
    "tests/utils/test_parallel.py",
)


class Outcomes(NamedTuple):
    """What one pytest did. `chance` has the first failure of each test that may pass if run again."""

    passed: list[str]
    chance: dict[str, str]
    certain: dict[str, str]  # what is wrong beyond doubt: the test, or another name, and the reason


def run(command: list[str]) -> Outcomes:
    name = shlex.join(command)
    print(f"\n$ {name}", flush=True)
    with TemporaryDirectory() as folder:
        file = Path(folder, "outcomes.json")
        plugin = {
            "PYTEST_PLUGINS": "recorder",
            "PYTHONPATH": str(Path(__file__).resolve().parent),
            "OUTCOMES": str(file),
        }
        status = subprocess.run(command, env=os.environ | plugin).returncode
        record = loads(file.read_text()) if file.exists() else {"passed": [], "failures": []}
    certain = {test: kind for test, kind, _ in record["failures"] if kind != "failed"}
    chance: dict[str, str] = {}
    for test, _, text in record["failures"]:
        if test not in certain:
            chance.setdefault(test, text)
    if not certain and (status != bool(chance) or not (record["passed"] or chance)):
        certain[name] = f"exit status {status} with {len(record['passed'])} passed, {len(chance)} failed"
    return Outcomes(record["passed"], chance, certain)


def run_again(tests: list[str]) -> Outcomes:
    """Run tests in one process: what fails only beside other tests passes here.

    Their ids are read from a file, a line each, so no shell or space splits them. An id that holds a line end is not
    found, which is an error. The empty -m selects tests of every marker.
    """
    with TemporaryDirectory() as folder:
        arguments = Path(folder, "tests")
        arguments.write_bytes(os.fsencode("\n".join(tests)))
        return run([sys.executable, "-P", "-m", "pytest", "-m", "", f"@{arguments}"])


def judge(command: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """How many tests passed, flaky tests with their first failure, and what failed with the reason."""
    first = run(["bash", "-c", command])
    flaky: dict[str, str] = {}
    failed = dict(first.certain)
    if first.chance:
        again = run_again(list(first.chance))
        failed |= again.certain
        for test, text in first.chance.items():
            if test not in again.passed:
                failed.setdefault(test, "failed, and did not pass when run again")
            elif any(fnmatchcase(test.partition("::")[0], pattern) for pattern in RACES):
                failed[test] = f"failed, then passed: a race\n{text}"
            else:
                flaky[test] = f"failed, then passed\n{text}"
    return len(first.passed) + len(flaky), flaky, failed


def main(commands: list[str]) -> int:
    passed = 0
    flaky: dict[str, str] = {}
    failed: dict[str, str] = {}
    for command in commands:
        count, chance, certain = judge(command)
        passed += count
        flaky |= chance
        failed |= certain
    sys.stdout.reconfigure(errors="backslashreplace")  # a failure may quote what the terminal cannot show
    for title, entries in ("flaky", flaky), ("failed", failed):
        if entries:
            print(f"\n{f' {title} ':=^80}")
            for test, text in entries.items():
                print(f"{test}: {text}".replace("\n", "\n    "))
    print(f"\n{passed} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
