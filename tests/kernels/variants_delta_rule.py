"""The kernels of the gated delta rule at the sizes of real models."""

from typing import Any

import torch

from rptrain.kernels import delta_gradients, delta_scan
from rptrain.kernels.batch import CHUNK
from rptrain.kernels.delta_rule import BLOCK
from rptrain.kernels.delta_tiles import Launch, Tiles, tiles
from rptrain.kernels.target import named
from tests.kernels.compiling import Variant

WIDE = ("interactions", "sums", "decay", "beta", "ddecay", "dbeta", "dsums", "dbetas")
TYPES = {"documents": "*i64", "starts": "*i32", "ends": "*i32", "cu_seqlens": "*i32", "scale": "fp32", "tokens": "i32"}
# The fastest programs of those that were tried on an H200 spill a little.
SPILLED = {"scan": 256, "scan_backward": 96, "pair_gradients": 96, "key_gradients": 32}


def variant(
    kernel: Any, launch: Launch | None, tile: Tiles, kind: str, architectures: tuple[int, ...], **constants: Any
) -> Variant:
    """A kernel for 16 key and 48 value heads of 128 columns."""
    name = kernel.fn.__name__
    known = {"K": 16, "H": 48, "C": 128, "V": 128, "CB": 128, "L": CHUNK, "BC": tile.columns, "B": BLOCK, **constants}
    known |= {"PRECISION": "ieee" if kind == "fp32" else "tf32", "STAGES": tile.scan.stages}
    known |= {"HAS_INITIAL": False, "HAS_LAST": False, "initial": None, "last": None, "HAS_INTERACTIONS": True}
    options = {"num_warps": 4}
    if launch is not None:
        known["BV"], options = launch.values, {"num_warps": launch.warps, "num_stages": launch.stages}
    known = {key: value for key, value in known.items() if key in kernel.arg_names}
    signature = {
        key: TYPES.get(key, "*fp32" if key in WIDE else f"*{kind}") for key in kernel.arg_names if key not in known
    }
    stack = SPILLED.get(name, 0) if architectures == (90,) and kind != "fp32" else 0
    return Variant(kernel, signature, known, options, architectures, stack)


def kernels(kind: str, architectures: tuple[int, ...]) -> list[Variant]:
    tile = tiles(torch.float32 if kind == "fp32" else torch.bfloat16, named(architectures[0]))
    return [
        variant(delta_scan.prepare, None, tile, kind, architectures),
        variant(delta_scan.scan, tile.scan, tile, kind, architectures),
        variant(delta_scan.scan_backward, tile.scan, tile, kind, architectures),
        variant(delta_gradients.pair_gradients, tile.pairs, tile, kind, architectures),
        variant(delta_gradients.query_gradients, tile.queries, tile, kind, architectures),
        variant(delta_gradients.key_gradients, tile.keys, tile, kind, architectures),
        variant(delta_scan.invert, None, tile, kind, architectures),
        variant(delta_gradients.decay_gradients, None, tile, kind, architectures, PARTS=128 // tile.columns, HB=16),
    ]


VARIANTS = [
    *(one for group in ((80, 86, 89), (90,), (120,)) for one in kernels("bf16", group)),
    *kernels("fp32", (80, 86, 89, 90, 120)),
]
