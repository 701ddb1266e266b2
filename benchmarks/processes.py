"""Compares a run of one process with the same run in several, which torchrun starts on this machine: losses, tokens per
second, and host memory beside the plan's.

python -m benchmarks.processes --processes 1 2 --turns 2 --steps 8 --out FILE --config CONFIG [key=value…]

Each run is ended after its steps, without a checkpoint. Exit code 1 unless the losses are equal.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

from benchmarks.commit import commit
from rptrain.machine.gpus import resolve
from rptrain.machine.hardware import device_kind
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events

LOOK = 0.05  # seconds between two looks at the records
HOST = "host memory"

Kind = TypeVar("Kind", bound=events.Event)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    runs = [
        measure(count, given.steps, given.warmup, ["--config", given.config, *given.overrides])
        for _ in range(given.turns)
        for count in given.processes
    ]
    speeds = {
        count: median(run["tokens_per_second"] for run in runs if run["processes"] == count)
        for count in given.processes
    }
    result = {
        "commit": commit(),
        "device": device_kind(resolve("auto")[0]),
        "config": [given.config, *given.overrides],
        "same_losses": all(run["losses"] == runs[0]["losses"] for run in runs),
        "speed_over_first": {count: speed / speeds[given.processes[0]] for count, speed in speeds.items()},
        "runs": runs,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    return int(not result["same_losses"])


def measure(count: int, steps: int, warmup: int, arguments: Sequence[str]) -> dict[str, Any]:
    """One run in so many processes, which are killed after its steps."""
    program = [sys.executable, "-P", "-m"]
    if count > 1:
        program += ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "run")
        own = [f"save.output_dir={folder}", "log.run_name=run", "log.logging_steps=1"]
        own += [f"train.max_steps={100 * steps}", "save.save_steps=0"]
        process = subprocess.Popen([*program, "rptrain", *arguments, *own], stdout=subprocess.DEVNULL)
        while process.poll() is None and len(recorded(run, events.Step)) < steps:
            time.sleep(LOOK)
        assert process.poll() is None, f"ended with {process.returncode}"
        found = recorded(run, events.Step)[:steps]
        started = [recorded(run.of_process(rank), events.ProcessStarted)[-1] for rank in range(count)]
        trainers = [psutil.Process(one.pid) for one in started]
        memory = [trainer.memory_full_info().pss for trainer in trainers]
        for trainer in trainers:
            trainer.kill()
        process.terminate()
        process.wait()
    times = [step.time for step in found]
    planned = [sum(size for _, size in host["parts"]) for one in started for host in one.memory if host["kind"] == HOST]
    return {
        "processes": count,
        "losses": [step.loss for step in found],
        "tokens_per_second": found[-1].tokens / median(after - before for before, after in pairwise(times[warmup:])),
        "memory_gib": [round(size / 2**30, 3) for size in memory],
        "planned_gib": [round(size / 2**30, 3) for size in planned],
        "memory_over_plan": [round(size / plan, 4) for size, plan in zip(memory, planned, strict=True)],
    }


def recorded(run: RunDir, kind: type[Kind]) -> list[Kind]:
    """The records of a kind, as far as they were written."""
    path = run.path / "events.jsonl"
    return [event for event in events.read(path) if isinstance(event, kind)] if path.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
