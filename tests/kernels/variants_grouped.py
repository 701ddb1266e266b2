"""What kernels/grouped.py launches for Qwen3-MoE and GPT-OSS; Hopper's tiles and those of the others."""

from rptrain.kernels import grouped
from rptrain.kernels.grouped import Tiles
from tests.kernels.compiling import ARCHITECTURES, Variant

SHAPES = ((2048, 1536), (2880, 5760), (768, 2048))  # inner and outer size


def _launches(tiles: Tiles, dtype: str, architectures: tuple[int, ...]) -> list[Variant]:
    sizes = grouped._sizes(tiles)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    signature = dict.fromkeys(("x", "w", "bias", "y", "dy"), dtype) | {"ends": "*i32", "acc": "*fp32", "experts": "i32"}
    found = []
    for inner, outer in SHAPES:
        product = {"K": inner, "M": outer, "BY_ROW": inner, "BY_EXPERT": inner * outer}
        for strides in ((1, inner), (outer, 1)):
            layout = dict(zip(("BY_INNER", "BY_COLUMN"), strides, strict=True)) | {"EXPERTS": 128, "BIAS": True}
            found.append((grouped._grouped_kernel, product | layout))
        rows = {"X_BY_ROW": inner, "DY_BY_ROW": outer, "BY_EXPERT": inner * outer, "BY_INNER": outer}
        found.append((grouped._weight_grad_kernel, {"K": inner, "M": outer} | rows))
    return [Variant(kernel, signature, sizes | each, options, architectures) for kernel, each in found]


OTHERS = tuple(each for each in ARCHITECTURES if each != 90)
COMMON = {"acc": "*fp32", "dy": "*bf16", "y": "*bf16", "bias": "*bf16", "ends": "*i32", "columns": "i32"}
VARIANTS = [
    *_launches(grouped.HOPPER, "*bf16", (90,)),
    *_launches(grouped.AMPERE, "*bf16", OTHERS),
    *_launches(grouped.WIDE, "*fp32", (80, 90))[1:3],
    Variant(grouped._bias_grad_kernel, COMMON, {"ROWS": 32, "COLUMNS": 128}, {"num_warps": 4}),
    Variant(grouped._add_bias_kernel, COMMON | {"experts": "i32"}, {"EXPERTS": 32, "BLOCK": 2048}, {"num_warps": 4}),
]
