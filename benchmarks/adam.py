"""An update of bfloat16 weights on the CPU beside a plain copy of as many bytes by as many threads, in turns.

python -m benchmarks.adam [MILLIONS OF PARAMETERS, 100] [THREADS, those of a run]. A parameter's update reads 14 bytes
and writes 12 (weight, rest of the float32 weight and gradient 2 each, moments 8); the copy reads and writes 13. What is
compared is the best of each.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from rptrain.engine.optim.adam import CpuAdam, UpdateArgs
from rptrain.engine.optim.traffic import update_bytes
from rptrain.utils.native import finish

ROUNDS = 9
PIECE = 1 << 20  # float32 numbers that a thread copies at a time
READ_AND_WRITTEN = round(update_bytes(torch.bfloat16, "fp32"))  # bytes a parameter


def measure(parameters: int, threads: int | None = None) -> dict[str, float]:
    """Seconds and bytes a second of both, and the share of the copy's rate that an update reaches."""
    torch.set_num_threads(1)
    weights = torch.randn(parameters).bfloat16()
    part = UpdateArgs(
        source=weights,
        target=torch.zeros_like(weights),
        remainder=torch.zeros(parameters, dtype=torch.int16),
        grad=torch.randn(parameters).bfloat16(),
        exp_avg=torch.zeros(parameters),
        exp_avg_sq=torch.zeros(parameters),
        lr=1e-5,
        weight_decay=0.01,
        step=1,
        grad_scale=1.0,
    )
    half = parameters * READ_AND_WRITTEN // 2 // 4
    source, target = torch.ones(half), torch.zeros(half)
    with CpuAdam((0.9, 0.95), 1e-8, threads) as adam:
        pieces = zip(target.split(PIECE), source.split(PIECE), strict=True)
        copies = [partial(into.copy_, piece) for into, piece in pieces]
        update = copy = float("inf")
        for _ in range(ROUNDS):
            update = min(update, _seconds(lambda: adam.update(**part)))
            copy = min(copy, _seconds(lambda: finish(adam.pool, copies)))
        moved = parameters * READ_AND_WRITTEN
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
    given = [int(argument) for argument in sys.argv[1:]]
    print(json.dumps(measure((given[0] if given else 100) * 10**6, *given[1:]), indent=1))
