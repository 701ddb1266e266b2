"""Compare the speed of settings: `rptrain bench` with each of them in turn, several times.

python -m benchmarks.compare OUT.json [--turns 2] [--common "ARGUMENTS"] "ARGUMENTS" "ARGUMENTS" ...: each text has the
arguments of one `rptrain bench`, and those of --common come before them. OUT.json is replaced after every run. It has
the whole report of each run and, for each setting, the median of its tokens per second and their ratio to the first
setting's.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any


def bench(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "rptrain", "bench", "--json", *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"exit status {run.returncode} of: {shlex.join(command)}")
    return json.loads(run.stdout)


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By setting, in the order of their first runs."""
    speeds: dict[str, list[float]] = {}
    for one in runs:
        speeds.setdefault(one["setting"], []).append(one["report"]["throughput"]["tokens_per_second"])
    medians = {setting: median(found) for setting, found in speeds.items()}
    first = next(iter(medians.values()))
    return {setting: {"tokens_per_second": speed, "ratio": speed / first} for setting, speed in medians.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--common", default="", type=shlex.split)
    parser.add_argument("settings", nargs="+")
    given = parser.parse_args(arguments)
    commit = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
    runs: list[dict[str, Any]] = []
    for turn in range(given.turns):
        for setting in given.settings:
            runs.append({"setting": setting, "report": bench([*given.common, *shlex.split(setting)])})
            found = summary(runs)
            result = {
                "commit": commit.stdout.strip() or "unknown",
                "common": shlex.join(given.common),
                "settings": found,
                "runs": runs,
            }
            given.out.write_text(json.dumps(result, indent=1) + "\n")
            speed = runs[-1]["report"]["throughput"]["tokens_per_second"]
            print(f"turn {turn + 1}: {speed:.0f} tokens/s  {setting or '(nothing more)'}", flush=True)
    for setting, values in summary(runs).items():
        print(
            f"median: {values['tokens_per_second']:.0f} tokens/s, {values['ratio']:.3f}  {setting or '(nothing more)'}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
