"""The attention kernels with the tiles of each card's table, at heads of real models."""

import torch

from rptrain.kernels import flash
from rptrain.kernels.target import named
from tests.kernels.compiling import AMD, ARCHITECTURES, Variant

TYPES = {"positions": "*i64", "cu_seqlens": "*i32", "limits": "*i32", "scale": "fp32"}
SCALES = ("q_scales", "k_scales", "v_scales", "dout_scales")
TYPES |= dict.fromkeys(("lse", "delta", "dsinks", *SCALES), "*fp32")
TYPES |= dict.fromkeys(("tokens", "twice_documents", "window", "period"), "i32")
ALL = ("forward", "dq", "dkdv")


def variants(
    architecture: int | str,
    dtype: str,
    size: int,
    heads: int,
    kv_heads: int,
    names: tuple[str, ...] = ALL,
    sinks: bool = False,
    stack: int = 0,
    half_sums: bool = False,
) -> list[Variant]:
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    passes = flash.tiles(kind, size, named(architecture), half_sums=half_sums)
    operand = "fp16" if half_sums else dtype
    block = max(16, flash.power_of_2(size))
    found = []
    for name in names:
        kernel = {"forward": flash._forward, "dq": flash._backward_queries, "dkdv": flash._backward_keys}[name]
        tile: flash.Tiles = getattr(passes, name)
        types = {arg: TYPES.get(arg, f"*{dtype}") for arg in kernel.arg_names if not arg.isupper()}
        types |= dict.fromkeys(types.keys() & {"q", "k", "v", "dout"}, f"*{operand}")
        if passes.tma:
            for arg in types.keys() & {"q", "k", "v", "dout"}:
                rows = tile.keys if arg in "kv" else tile.queries
                types[arg] = f"tensordesc<{operand}[1, {rows}, {block}]>"
        constants = {
            arg: (heads if arg in ("Q_STRIDE", "OUT_STRIDE", "DOUT_STRIDE", "DQ_STRIDE") else kv_heads) * size
            for arg in kernel.arg_names
            if arg.endswith("_STRIDE")
        }
        constants["V_STRIDE"] = (heads + 2 * kv_heads) * size
        constants |= {"GROUP": heads // kv_heads, "C": size, "BLOCK_C": block, "TMA": passes.tma}
        constants |= {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys}
        absent = types.keys() & {*(() if sinks else ("sinks", "dsinks")), *(() if half_sums else SCALES)}
        constants |= dict.fromkeys(absent)
        types = {arg: kind for arg, kind in types.items() if arg not in absent}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        found.append(Variant(kernel, types, constants, options, (architecture,), stack, half_sums))
    return found


VARIANTS = [variant for a in ARCHITECTURES for variant in variants(a, "bf16", 128, 16, 8)]  # Qwen3-1.7B
VARIANTS += [variant for a in ARCHITECTURES for variant in variants(a, "bf16", 64, 64, 8, sinks=True)]  # GPT-OSS
VARIANTS += variants(80, "bf16", 256, 16, 8) + variants(86, "bf16", 256, 16, 8) + variants(90, "bf16", 256, 16, 8)
VARIANTS += [variant for a in (86, 89, 90, 120) for variant in variants(a, "bf16", 256, 24, 4)]  # Qwen3.5-27B
VARIANTS += variants(86, "bf16", 96, 32, 32, ("dkdv",)) + variants(90, "bf16", 80, 32, 32, ("dkdv",))
VARIANTS += variants(86, "fp32", 64, 32, 8) + variants(90, "fp32", 128, 32, 8)
VARIANTS += variants(75, "fp32", 128, 32, 8) + variants(75, "bf16", 256, 16, 8, ("forward",))
# Backwards without matrix units, of heads of 256: with any tiles they need more registers than there are.
VARIANTS += variants(75, "bf16", 256, 16, 8, ("dq", "dkdv"), stack=1024)
for architecture in (75, 86):
    VARIANTS += variants(architecture, "fp32", 256, 16, 8, ("dq",), stack=256)
    VARIANTS += variants(architecture, "fp32", 256, 16, 8, ("forward", "dkdv"))
# Of heads of 512 the tiles that spill a little are faster than smaller ones that do not.
for architecture in (80, 86, 89, 120):
    VARIANTS += variants(architecture, "bf16", 512, 16, 4, ("forward",))
    VARIANTS += variants(architecture, "bf16", 512, 16, 4, ("dq", "dkdv"), stack=128)
VARIANTS += variants(90, "bf16", 512, 16, 4, ("forward",)) + variants(90, "bf16", 512, 16, 4, ("dq", "dkdv"), stack=640)
VARIANTS += variants(75, "bf16", 512, 16, 4, ("forward",)) + variants(
    75, "bf16", 512, 16, 4, ("dq", "dkdv"), stack=4096
)
VARIANTS += variants(86, "fp32", 512, 16, 4, ("forward", "dkdv")) + variants(
    86, "fp32", 512, 16, 4, ("dq",), stack=2048
)
for architecture in (80, 86, 89, 90, 120):
    VARIANTS += variants(architecture, "bf16", 128, 16, 8, half_sums=True)
    VARIANTS += variants(architecture, "bf16", 64, 64, 8, sinks=True, half_sums=True)
VARIANTS += variants(86, "bf16", 96, 32, 32, half_sums=True) + variants(90, "bf16", 80, 32, 32, half_sums=True)
for architecture in AMD:
    VARIANTS += variants(architecture, "bf16", 128, 16, 8) + variants(architecture, "bf16", 64, 64, 8, sinks=True)
    VARIANTS += variants(architecture, "fp32", 128, 32, 8)
PARTIALS = {"partials": "*fp32", "total": "*fp32", "count": "i32", "width": "i32"}
VARIANTS += [Variant(flash._add_partials, PARTIALS, {"ROWS": 32, "BLOCK": 64})]
