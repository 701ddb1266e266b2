"""Sizes of the tiles of the gated delta rule's kernels, by architecture."""

from typing import NamedTuple

import torch

from rptrain.kernels.target import KB, Target


class Launch(NamedTuple):
    """How a kernel is launched, and the columns of values of a tile."""

    values: int
    warps: int
    stages: int = 1

    @property
    def options(self) -> dict[str, int]:
        return {"BV": self.values, "num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    """The launches of each kernel. `stages` of scans are those of their loop over chunks."""

    scan: Launch
    pairs: Launch
    queries: Launch
    keys: Launch
    columns: int  # of keys, in a tile of the gradients of queries and keys
    least: int  # columns of keys that tiles of scans have at least


# With tiles of fewer columns, Triton 3.6 compiles programs for Hopper that compute wrong products or read outside their
# memory. Those of scans spill a few registers; they are the fastest of those that were tried on an H200.
LARGE = Tiles(Launch(64, 8, 3), Launch(64, 4, 2), Launch(64, 4, 2), Launch(64, 4, 2), columns=64, least=128)
SMALL = Tiles(Launch(32, 8), Launch(32, 4), Launch(64, 4), Launch(32, 8), columns=32, least=32)
TIGHT = SMALL._replace(keys=Launch(16, 8))
WIDE = Tiles(Launch(16, 4), Launch(16, 4), Launch(16, 4), Launch(16, 4), columns=32, least=32)  # float32


def tiles(dtype: torch.dtype, target: Target) -> Tiles:
    """The tiles for a GPU."""
    if dtype == torch.float32:
        return WIDE
    if target.shared_memory >= 227 * KB and target.async_matrix_units:
        return LARGE
    return TIGHT if target.tight_registers else SMALL
