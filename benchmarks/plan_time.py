"""The CPU time of `rptrain plan` beside that of a bare `import torch`, in turns. Prints JSON.

    python -m benchmarks.plan_time [REPETITIONS] > benchmarks/results/plan-time.json

Seconds are user and system time of a process and its children. The large presets are planned for eight GPUs, which
reads no data; the tiny one for this machine, with its tokenizer and its data, which an earlier plan has read ("again")
or none has.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.commit import commit

CONFIG = """[model]
path = "{model}"
[[data.train]]
path = "builtin:tasks"
[data]
max_length = 2048
[train]
micro_batch_size = {micro_batch}
global_batch_size = 64
max_steps = 10
"""
PLAN = (sys.executable, "-P", "-m", "rptrain", "plan", "--config")
MACHINE = ("--gpus", "8", "--card", "rtx4090", "--host")
TINY = "tiny-tasks, with tokenizer and data"
ADAPTERS = ("lora.r=16", "lora.base=nf4")
CASES = {  # name: model, micro-batch, host memory, overrides
    "llama-3.1-8b": ("llama-3.1-8b", "4", "800GiB", ()),
    "llama-3.1-8b, micro-batch auto": ("llama-3.1-8b", '"auto"', "800GiB", ()),
    "qwen3-235b-a22b": ("qwen3-235b-a22b", "4", "8TiB", ()),
    "qwen3-235b-a22b, NF4, micro-batch auto": ("qwen3-235b-a22b", '"auto"', "1TiB", ADAPTERS),
}


def cpu_seconds(command: Sequence[str], cache: Path) -> float:
    """User and system time of a command with this cache folder of the user. RuntimeError if it fails; a plan that does
    not fit ends with 2.
    """
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main(repetitions: int) -> None:
    with TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        commands = {"import torch": [sys.executable, "-c", "import torch"]}
        for number, (name, (model, micro_batch, host, overrides)) in enumerate(CASES.items()):
            file = Path(folder, f"{number}.toml")
            file.write_text(CONFIG.format(model=model, micro_batch=micro_batch))
            commands[name] = [*PLAN, str(file), *overrides, *MACHINE, host]
        file = Path(folder, "tiny.toml")
        file.write_text(CONFIG.format(model="tiny-tasks", micro_batch="4"))
        commands[TINY] = commands[f"{TINY}, again"] = [*PLAN, str(file)]
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repetitions):
            rmtree(cache, ignore_errors=True)
            for name, command in commands.items():
                taken[name].append(cpu_seconds(command, cache))
    bare = min(taken["import torch"])
    seconds = {
        name: {"least": round(min(found), 3), "median": round(median(found), 3), "more": round(min(found) - bare, 3)}
        for name, found in taken.items()
    }
    print(json.dumps({"commit": commit(), "repetitions": repetitions, "seconds": seconds}, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
