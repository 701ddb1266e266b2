"""What kernels/grouped.py launches for Qwen3-MoE and GPT-OSS, with the tiles of each card."""

import torch

from rptrain.kernels import grouped
from rptrain.kernels.target import named
from tests.kernels.compiling import AMD, ARCHITECTURES, Variant

SHAPES = ((2048, 1536), (2880, 5760), (768, 2048))  # inner and outer size
RANK = 16  # of adapters


def _launches(architecture: int | str, dtype: str) -> list[Variant]:
    tiles = grouped._tiles_for({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], named(architecture))
    sizes = grouped._sizes(tiles)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    signature = dict.fromkeys(("x", "w", "bias", "y", "dy"), f"*{dtype}")
    signature |= {"ends": "*i32", "acc": "*fp32", "experts": "i32"}
    found = []
    for inner, outer in SHAPES:
        product = {"K": inner, "M": outer, "BY_ROW": inner, "BY_EXPERT": inner * outer}
        for strides in ((1, inner), (outer, 1)):
            layout = dict(zip(("BY_INNER", "BY_COLUMN"), strides, strict=True)) | {"EXPERTS": 128}
            found.append((grouped._grouped_kernel, product | layout | {"BIAS": True, "ADD": False}))
        adapter = {"K": RANK, "BY_ROW": RANK, "BY_EXPERT": RANK * outer, "BY_INNER": outer, "BY_COLUMN": 1}
        adapter |= {"EXPERTS": 128, "BIAS": False, "ADD": True, "INNER": grouped._for_adding(tiles).inner}
        found.append((grouped._grouped_kernel, product | adapter))
        rows = {"X_BY_ROW": inner, "DY_BY_ROW": outer, "BY_EXPERT": inner * outer, "BY_INNER": outer}
        found.append((grouped._weight_grad_kernel, {"K": inner, "M": outer} | rows))
    return [Variant(kernel, signature, sizes | each, options, (architecture,)) for kernel, each in found]


COMMON = {"acc": "*fp32", "dy": "*bf16", "y": "*bf16", "bias": "*bf16", "ends": "*i32", "columns": "i32"}
VARIANTS = [
    *(variant for architecture in (*ARCHITECTURES, *AMD) for variant in _launches(architecture, "bf16")),
    *(variant for architecture in (75, 80, 90) for variant in _launches(architecture, "fp32")[1:4]),
    Variant(grouped._bias_grad_kernel, COMMON, {"ROWS": 32, "COLUMNS": 128}, {"num_warps": 4}),
    Variant(grouped._add_bias_kernel, COMMON | {"experts": "i32"}, {"EXPERTS": 32, "BLOCK": 2048}, {"num_warps": 4}),
]
