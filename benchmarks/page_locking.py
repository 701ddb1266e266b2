"""Measure what it costs if host memory cannot be page-locked, and check that the same bits result.

python -m benchmarks.page_locking [KEY=VALUE...] [--config benchmarks/qwen3-1.7b.toml] [--out OUT.json] [--steps 4]
    [--warmup 2]

Trains a config with everything page-locked, with a limit of a quarter of the bytes that GPUs copy, and with nothing,
on one plan. What is beyond the limit is refused by the driver itself, so its error is left in CUDA's runtime as by a
real refusal. Needs a GPU. Prints JSON, and exits with status 1 if losses differ.
"""

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.commit import commit
from rptrain.bench.report import Report
from rptrain.bench.run import bench
from rptrain.config.resolve import resolve
from rptrain.engine.memory import arena
from rptrain.utils.allocator import keep_allocator_tidy

ROOT = Path(__file__).resolve().parent.parent
HUGE = 1 << 50  # bytes that no machine locks


class LimitedRuntime:
    """The CUDA runtime where no more than `limit` bytes are registered at a time."""

    def __init__(self, runtime: Any, limit: int) -> None:
        self._runtime, self.left = runtime, limit
        self._sizes: dict[int, int] = {}
        self._counting = threading.Lock()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        with self._counting:
            allowed = nbytes <= self.left
            if allowed:
                self.left -= nbytes
                self._sizes[address] = nbytes
        return int(self._runtime.cudaHostRegister(address if allowed else 0, nbytes, flags))

    def cudaHostUnregister(self, address: int) -> int:
        status = int(self._runtime.cudaHostUnregister(address))
        with self._counting:
            self.left += self._sizes.pop(address)
        return status


@contextmanager
def lockable(limit: int) -> Iterator[LimitedRuntime]:
    """Limits the bytes of host memory that this process can page-lock."""
    limited, pin = LimitedRuntime(torch.cuda.cudart(), limit), Tensor.pin_memory

    def pin_memory(tensor: Tensor) -> Tensor:
        if tensor.nbytes > limited.left:
            return torch.empty(HUGE, dtype=torch.uint8, pin_memory=True)  # raises an error
        return pin(tensor)

    with patch.object(arena, "_cudart", lambda: limited), patch.object(Tensor, "pin_memory", pin_memory):
        yield limited


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.page_locking", description="Measure what it costs if host memory cannot be page-locked."
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config", type=Path, default=ROOT / "benchmarks" / "qwen3-1.7b.toml")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    given = parser.parse_args(arguments)
    keep_allocator_tidy()
    resolved = resolve(given.config, [*given.overrides, "engine.replan=false"])

    def measure(name: str) -> Report:
        def tell(text: str) -> None:
            print(f"{name}: {text}", file=sys.stderr)

        return bench(resolved, steps=given.steps, warmup=given.warmup, tell=tell)

    reports = {"all": measure("all")}
    copied = reports["all"].locking.copied
    for name, limit in (("a quarter", copied // 4), ("none", 0)):
        with lockable(limit):
            reports[name] = measure(name)
    losses = {name: report.losses for name, report in reports.items()}
    same = len({*losses.values()}) == 1
    found = {
        "commit": commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "config": [given.config.name, *given.overrides],
        "same_losses": same,
        "runs": {name: figures(report, reports["all"]) for name, report in reports.items()},
    }
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    return 0 if same else 1


def figures(report: Report, whole: Report) -> dict[str, Any]:
    """What a run locked, and its speed beside that of the run that locked everything."""
    return {
        "copied_bytes": report.locking.copied,
        "locked_bytes": report.locking.locked,
        "tokens_per_second": report.tokens_per_second,
        "of_all_locked": median(whole.steps) / median(report.steps),
        "steps": report.steps,
        "losses": report.losses,
        "busy": [usage.busy / usage.total for usage in report.usages],
        "upload": report.measured and report.measured.upload,
        "download": report.measured and report.measured.download,
        "plan": str(report.job.plan.plan),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
