"""Compare the losses of a real model's training in bfloat16 with those in FP8, in async and in sync.

"fp8-float16-sums" also sums products of attention and of the head in float16, as engine.fp8 does on GeForce cards.

python -m benchmarks.learning MODEL OUT.json [KEY=VALUE ...]: MODEL is the directory of SmolLM2-135M-Instruct that
tests/test_real_model.py describes. The text is `pydoc_data.topics` of the standard library, less than one epoch of it.
All runs are trained at the same time, spread over the GPUs, with the same batches. The last figure of a line is the
mean loss of the last 20 steps over that of bfloat16.
"""

import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean
from tempfile import TemporaryDirectory

import torch

from benchmarks.commit import commit
from rptrain.runs.records import events

STEPS, LAST = 120, 20
CONFIG = """
[model]
path = "{model}"
dtype = "bfloat16"
[[data.train]]
path = "topics.jsonl"
[data]
max_length = 768
[train]
micro_batch_size = 1
global_batch_size = 1
max_steps = {steps}
[optim]
learning_rate = 5e-5
lr_scheduler_type = "constant"
[engine]
vram_limit = "12GiB"
[save]
resume = "never"
"""
PROGRAM = "from rptrain.cli import main; main()"
GEFORCE = f"import rptrain.preflight.model as model; model.sums_at_half_rate = lambda card: True; {PROGRAM}"
FORMATS = {  # by name: the program, and its keys
    "bf16": (PROGRAM, ()),
    "fp8": (PROGRAM, ("engine.fp8=true",)),
    "fp8-float16-sums": (GEFORCE, ("engine.fp8=true",)),
}


def start(folder: Path, name: str, program: str, keys: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-c", program, "--config", "learning.toml", f"log.run_name={name}", *keys]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)


def losses(folder: Path, name: str) -> list[float | None]:
    records = events.read(folder / "runs" / name / "events.jsonl")
    return [record.loss for record in records if isinstance(record, events.Step)]


def main(model: str, out: str, keys: tuple[str, ...]) -> None:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "topics.jsonl").write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in topics))
        (folder / "learning.toml").write_text(CONFIG.format(model=Path(model).absolute(), steps=STEPS))
        devices = cycle(
            [f'engine.devices="cuda:{index}"' for index in range(torch.cuda.device_count())]
            or ['engine.devices="cpu:1"']
        )
        runs = {
            (update, name): start(
                folder, f"{update}-{name}", program, (f"optim.update={update}", next(devices), *chosen, *keys)
            )
            for update in ("async", "sync")
            for name, (program, chosen) in FORMATS.items()
        }
        if failed := [name for name, process in runs.items() if process.wait()]:
            raise SystemExit(f"these runs failed: {failed}")
        found: dict[str, dict[str, list[float | None]]] = {}
        for update, name in runs:
            found.setdefault(update, {})[name] = losses(folder, f"{update}-{name}")
    ends = {
        update: {name: mean(loss or float("nan") for loss in curve[-LAST:]) for name, curve in curves.items()}
        for update, curves in found.items()
    }
    for update, means in ends.items():
        for name, end in means.items():
            print(f"{update} {name}: {end:.4f}  {end / means['bf16']:.5f}")
    report = {"commit": commit(), "keys": keys, "means": ends, "losses": found}
    Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], tuple(sys.argv[3:]))
