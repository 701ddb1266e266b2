"""Compare the speed of settings: `rptrain bench` with each of them in turn, several times.

python -m benchmarks.compare --out OUT.json "--config RUN.toml" "--config RUN.toml engine.fp8=true": each argument has
the options and overrides of one `rptrain bench`. OUT.json is written after every run. It has the reports of all runs
and, of each setting, the median of its speeds in tokens per second, and the ratio of this median to that of the first.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.commit import commit
from rptrain.runs.folder.outputs import replace_text


def bench(setting: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "rptrain", "bench", "--json", *shlex.split(setting)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"exit status {run.returncode} of: {shlex.join(command)}")
    return json.loads(run.stdout)


def summary(settings: list[str], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median of each setting that has run. `runs` holds their reports, with the settings in turn."""
    speeds = [run["throughput"]["tokens_per_second"] for run in runs]
    medians = [median(speeds[place :: len(settings)]) for place in range(min(len(settings), len(runs)))]
    return [
        {"setting": setting, "tokens_per_second": speed, "ratio": speed / medians[0]}
        for setting, speed in zip(settings, medians, strict=False)
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.compare", description="Compare the speed of settings of rptrain bench, measured in turn."
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--turns", type=int, default=3, help="runs of each setting (default: 3)")
    parser.add_argument("settings", nargs="+", help='arguments of one rptrain bench: "--config RUN.toml KEY=VALUE ..."')
    given = parser.parse_args(arguments)
    if given.turns < 1:
        parser.error("--turns must be at least 1")
    if not given.out.parent.is_dir():
        parser.error(f"the folder {given.out.parent} does not exist")
    for setting in given.settings:
        try:
            shlex.split(setting)
        except ValueError as error:
            parser.error(f"{setting}: {error}")
    runs: list[dict[str, Any]] = []
    for setting in given.settings * given.turns:
        runs.append(bench(setting))
        result = {
            "commit": commit(),
            "settings": summary(given.settings, runs),
            "runs": runs,
        }
        replace_text(given.out, json.dumps(result, indent=1) + "\n")
        print(f"{runs[-1]['throughput']['tokens_per_second']:.0f} tokens/s: {setting}", flush=True)
    for found in summary(given.settings, runs):
        print(f"median {found['tokens_per_second']:.0f} tokens/s, {found['ratio']:.3f}: {found['setting']}")


if __name__ == "__main__":
    main(sys.argv[1:])
