"""An update of bfloat16 weights on the CPU beside a plain copy of as many bytes by as many threads, in turns.

python -m benchmarks.adam [MILLIONS OF PARAMETERS, 100] [THREADS, those of a run] [MOMENTS, fp32]. With moments in fp32
a parameter's update reads 14 bytes and writes 12 (weight, rest of the float32 weight and gradient 2 each, moments 8);
the copy reads and writes 13. What is compared is the best of each.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch

from rptrain.engine.memory.moments import BLOCK, Moments, layout
from rptrain.engine.optim.adam import CpuAdam, UpdateArgs
from rptrain.engine.optim.traffic import update_bytes
from rptrain.utils.native import finish

ROUNDS = 9
PIECE = 1 << 20  # float32 numbers that a thread copies at a time


def measure(parameters: int, threads: int | None = None, kind: Moments = "fp32") -> dict[str, float]:
    """Seconds and bytes per second of both, and the share of the copy's rate that an update reaches."""
    torch.set_num_threads(1)
    if kind == "int8":  # of whole blocks
        parameters -= parameters % BLOCK
    each = update_bytes(torch.bfloat16, kind)
    weights = torch.randn(parameters).bfloat16()
    states: Any = {
        name: torch.zeros(parameters // shared, dtype=dtype) for name, dtype, shared in layout(kind, torch.float32)
    }
    part = UpdateArgs(
        source=weights,
        target=torch.zeros_like(weights),
        remainder=torch.zeros(parameters, dtype=torch.int16),
        grad=torch.randn(parameters).bfloat16(),
        lr=1e-5,
        weight_decay=0.01,
        step=1,
        grad_scale=1.0,
        **states,
    )
    half = round(parameters * each) // 2 // 4
    source, target = torch.ones(half), torch.zeros(half)
    with CpuAdam((0.9, 0.95), 1e-8, threads) as adam:
        pieces = zip(target.split(PIECE), source.split(PIECE), strict=True)
        copies = [partial(into.copy_, piece) for into, piece in pieces]
        update = copy = float("inf")
        for _ in range(ROUNDS):
            update = min(update, _seconds(lambda: adam.update(**part)))
            copy = min(copy, _seconds(lambda: finish(adam.pool, copies)))
        moved = parameters * each
        return {
            "parameters": parameters,
            "threads": adam.threads,
            "native": adam.native,
            "update_seconds": update,
            "copy_seconds": copy,
            "update_bytes_per_second": moved / update,
            "copy_bytes_per_second": moved / copy,
            "share": copy / update,
        }


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.adam", description="Time AdamW on the CPU beside a copy.")
    parser.add_argument("millions", type=int, nargs="?", default=100, help="millions of parameters (default: 100)")
    parser.add_argument("threads", type=int, nargs="?", help="threads (default: those of a run)")
    parser.add_argument("moments", choices=get_args(Moments), nargs="?", default="fp32", help="default: fp32")
    given = parser.parse_args()
    print(json.dumps(measure(given.millions * 10**6, given.threads, given.moments), indent=1))
