"""The gates' kernels at the numbers of heads of real models, in both layouts of the product."""

from typing import Any

from rptrain.kernels import delta_gates
from tests.kernels.compiling import Variant


def variant(backward: bool, kind: str, by_head: bool, heads: int = 16, repeat: int = 3) -> Variant:
    constants: dict[str, Any] = delta_gates._constants(heads, repeat)
    options = {"num_warps": constants.pop("num_warps")}
    constants |= {"TOKEN": 2 * heads * repeat, "HEAD": 2 * repeat if by_head else repeat}
    names = ["b", "a", *(("db", "da") if backward else ())]
    wide = ["a_log", "dt_bias", *(("ddecay", "dbeta", "partials") if backward else ("decay", "beta"))]
    signature = dict.fromkeys(names, f"*{kind}") | dict.fromkeys(wide, "*fp32") | {"tokens": "i32"}
    return Variant(delta_gates._backward if backward else delta_gates._forward, signature, constants, options)


VARIANTS = [
    variant(backward, kind, by_head, *sizes)
    for backward in (False, True)
    for kind, by_head, *sizes in (
        ("bf16", False),
        ("bf16", True),
        ("fp16", False, 16, 2),
        ("fp32", False, 16, 4),
        ("bf16", False, 16, 1),
    )
]
