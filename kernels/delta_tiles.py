"""Sizes of the tiles of the gated delta rule's kernels, by architecture."""

from typing import Any, NamedTuple

import torch

from rptrain.kernels.target import KB, Target

MAX_KEY_SIZE = 128  # columns of a key head; the scan's tiles of more do not fit into the shared memory of Hopper


class Launch(NamedTuple):
    """How a kernel is launched, and the columns of values of a tile."""

    values: int
    warps: int
    stages: int = 1
    precision: str = "tf32"  # of products of float32: tf32x3 is three of tf32, with about the precision of float32

    @property
    def options(self) -> dict[str, Any]:
        return {
            "BV": self.values, "PRECISION": self.precision, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


class Tiles(NamedTuple):
    """The launches of each kernel. `stages` of scans are those of their loop over chunks."""

    scan: Launch
    pairs: Launch
    queries: Launch
    keys: Launch
    columns: int  # of keys, in a tile of the gradients of queries and keys
    prepared: int  # of keys, in a tile of `prepare`
    least: int  # columns of keys that tiles of scans have at least


# With tiles of fewer columns, Triton 3.6 compiles programs for Hopper that compute wrong products or read outside their
# memory. Those of scans spill a few registers; they are the fastest of those that were tried on an H200.
LARGE = Tiles(
    Launch(64, 8, 3), Launch(64, 4, 2), Launch(64, 4, 2), Launch(64, 4, 2), columns=64, prepared=128, least=128
)
SMALL = Tiles(Launch(32, 8), Launch(32, 4), Launch(64, 4), Launch(32, 8), columns=32, prepared=64, least=32)
TIGHT = SMALL._replace(keys=Launch(16, 8))
# Programs of float32 spill with any tiles. As products of tf32, `pairs` would need more shared memory than cards have.
WIDE = Tiles(
    Launch(16, 8, precision="tf32x3"),
    Launch(16, 8, precision="ieee"),
    Launch(16, 8, precision="tf32x3"),
    Launch(16, 8, precision="tf32x3"),
    columns=32,
    prepared=32,
    least=32,
)


def tiles(dtype: torch.dtype, target: Target) -> Tiles:
    """The tiles for a GPU."""
    if dtype == torch.float32:
        return WIDE
    if target.shared_memory >= 227 * KB and target.async_matrix_units:
        return LARGE
    return TIGHT if target.tight_registers else SMALL
