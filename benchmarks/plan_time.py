"""The CPU time of `rptrain plan` beside that of a bare `import torch`, in turns. Prints JSON.

    python -m benchmarks.plan_time [REPETITIONS] > benchmarks/results/plan-time.json

Seconds are user and system time of the whole process. The presets are planned for eight GPUs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.commit import commit

CONFIG = """[model]
path = "{model}"
[[data.train]]
path = "none.jsonl"
[data]
max_length = 2048
[train]
micro_batch_size = {micro_batch}
global_batch_size = 64
max_steps = 10
"""
MACHINE = ("--gpus", "8", "--card", "rtx4090", "--host")
ADAPTERS = ("lora.r=16", "lora.base=nf4")
CASES = {  # name: model, micro-batch, host memory, overrides
    "llama-3.1-8b": ("llama-3.1-8b", "4", "800GiB", ()),
    "llama-3.1-8b, micro-batch auto": ("llama-3.1-8b", '"auto"', "800GiB", ()),
    "qwen3-235b-a22b": ("qwen3-235b-a22b", "4", "8TiB", ()),
    "qwen3-235b-a22b, NF4, micro-batch auto": ("qwen3-235b-a22b", '"auto"', "1TiB", ADAPTERS),
}


def cpu_seconds(command: Sequence[str]) -> float:
    """User and system time of a command. RuntimeError if it fails; a plan that does not fit ends with 2."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main(repetitions: int) -> None:
    with TemporaryDirectory() as folder:
        commands = {"import torch": [sys.executable, "-c", "import torch"]}
        for number, (name, (model, micro_batch, host, overrides)) in enumerate(CASES.items()):
            file = Path(folder, f"{number}.toml")
            file.write_text(CONFIG.format(model=model, micro_batch=micro_batch))
            plan = [sys.executable, "-P", "-m", "rptrain", "plan", "--config", str(file)]
            commands[name] = [*plan, *overrides, *MACHINE, host]
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repetitions):
            for name, command in commands.items():
                taken[name].append(cpu_seconds(command))
    bare = min(taken["import torch"])
    seconds = {
        name: {"least": round(min(found), 3), "median": round(median(found), 3), "more": round(min(found) - bare, 3)}
        for name, found in taken.items()
    }
    print(json.dumps({"commit": commit(), "repetitions": repetitions, "seconds": seconds}, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
