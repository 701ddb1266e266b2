"""Sizes of the blocks of the attention kernels, by architecture, head size and pass."""

from typing import NamedTuple

import torch

from rptrain.kernels.launch import power_of_2
from rptrain.kernels.target import KB, Target


class Tiles(NamedTuple):
    """Queries and keys of a block, warps of a program, stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class Passes(NamedTuple):
    """The tiles of each kernel: forward, dq, and dk with dv; whether blocks come by the tensor memory accelerator."""

    forward: Tiles
    dq: Tiles
    dkdv: Tiles
    tma: bool = False


# By shared memory (at most 227 KB a program on 9.0 and 10.0, 163 KB on 8.0, else 99 KB) and padded head size. On 8.x,
# 9.0 and 12.0 no program of heads of up to 256 spills with them; the backward of heads of 512 spills a few, and
# tiles that spill none are slower. The tiles of large cards at 128 and 512, and of the others at 512, are the fastest
# that fit of benchmarks/sweep_attention.py on an H200.
NARROW = {
    "large": {
        64: Passes(Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2), tma=True),
        128: Passes(Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), tma=True),
        256: Passes(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), tma=True),
        512: Passes(Tiles(64, 64, 8, 1), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1), tma=True),
    },
    "medium": {
        64: Passes(Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(32, 128, 8, 2)),
        128: Passes(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
        256: Passes(Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
        512: Passes(Tiles(64, 16, 8, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
    "small": {
        64: Passes(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(32, 128, 8, 2)),
        128: Passes(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
        256: Passes(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 2)),
        512: Passes(Tiles(64, 16, 8, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
}
# For products summed in float16, whose sums are then added to float32 registers.
HALF = {
    "large": {64: NARROW["large"][64], 128: NARROW["large"][128]._replace(dkdv=Tiles(32, 64, 8, 2))},
    "small": {
        64: Passes(Tiles(128, 32, 8, 3), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 2)),
        128: Passes(Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
    },
}
# Float32 has products without matrix units (tf32 is too coarse, three of it need more registers than there are).
WIDE = {
    64: Passes(Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    128: Passes(Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1), Tiles(32, 32, 8, 1)),
    256: Passes(Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
    512: Passes(Tiles(16, 16, 8, 1), Tiles(8, 16, 8, 1), Tiles(16, 8, 8, 1)),
}
# For programs of 64 KB, and where Triton multiplies 16 bits too without matrix units: 7.x, on which with any tiles the
# backward of heads of 256 and 512 spills.
LEAST = {
    64: Passes(Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 16, 8, 1)),
    128: Passes(Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
    256: Passes(Tiles(16, 32, 8, 1), Tiles(8, 16, 8, 1), Tiles(16, 8, 4, 1)),
    512: Passes(Tiles(16, 16, 8, 1), Tiles(8, 16, 8, 1), Tiles(16, 8, 8, 1)),
}


def tiles(dtype: torch.dtype, head_size: int, target: Target, *, half_sums: bool = False) -> Passes:
    """The tiles for a GPU."""
    size, shared = max(64, power_of_2(head_size)), target.shared_memory
    if not target.matrix_units or shared < 99 * KB:
        return LEAST[size]
    if dtype == torch.float32:
        return WIDE[size]
    large = shared >= 227 * KB and target.tma
    if not large and shared >= 163 * KB and not half_sums:
        return NARROW["medium"][size]
    large = large and head_size % 8 == 0  # the accelerator wants 16 bytes
    return (HALF if half_sums else NARROW)["large" if large else "small"][size]
