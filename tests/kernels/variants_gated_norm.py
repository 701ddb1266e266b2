"""The gated norm's kernels at the shapes of real models, in both layouts of the product."""

from typing import Any

from rptrain.kernels import gated_norm
from tests.kernels.compiling import Variant


def variant(backward: bool, kind: str, by_head: bool, heads: int = 16, size: int = 128, repeat: int = 3) -> Variant:
    constants: dict[str, Any] = gated_norm._constants(heads * repeat, repeat, size)
    options = {"num_warps": constants.pop("num_warps")}
    row = 2 * heads * size * (1 + repeat)
    constants |= {"Z_TOKEN": row, "Z_HEAD": row // heads if by_head else repeat * size}
    names = ["x", "z", "weight", *(("dy", "dx", "dz") if backward else ("y",))]
    signature = dict.fromkeys(names, f"*{kind}") | {"rows": "i32", "eps": "fp32"}
    if backward:
        signature["partials"] = "*fp32"
    return Variant(gated_norm._backward if backward else gated_norm._forward, signature, constants, options)


VARIANTS = [
    variant(backward, kind, by_head, *sizes)
    for backward in (False, True)
    for kind, by_head, *sizes in (
        ("bf16", False),
        ("bf16", True),
        ("fp16", False),
        ("fp32", False),
        ("bf16", True, 8, 64, 1),
        ("bf16", False, 4, 256, 2),
    )
]
