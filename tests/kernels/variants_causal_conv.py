"""The convolution's kernels at the shapes of real models, in both layouts of the product."""

from typing import Any

from rptrain.kernels import causal_conv
from tests.kernels.compiling import Variant


def variant(
    backward: bool, kind: str, by_head: bool, heads: int = 16, size: int = 128, repeat: int = 3, width: int = 4
) -> Variant:
    values = repeat * size
    chosen = (causal_conv.BACKWARD, width - 1) if backward else (causal_conv.FORWARD, 0)
    constants: dict[str, Any] = causal_conv._constants(heads, size, values, width, *chosen)
    options = {"num_warps": constants.pop("num_warps")}
    row = 2 * heads * (size + values)
    constants |= {"TOKEN": row, "V_TOKEN": row}
    constants |= {"HEAD": row // heads, "V_HEAD": row // heads} if by_head else {"HEAD": size, "V_HEAD": values}
    names = ["q", "k", "v", "weight"]
    names += ["dq", "dk", "dv", "dq_in", "dk_in", "dv_in"] if backward else ["q_out", "k_out", "v_out"]
    signature = dict.fromkeys(names, f"*{kind}") | {"positions": "*i64", "tokens": "i32", "eps": "fp32"}
    if backward:
        signature["partials"] = "*fp32"
    return Variant(causal_conv._backward if backward else causal_conv._forward, signature, constants, options)


VARIANTS = [
    variant(backward, kind, by_head, *sizes)
    for backward in (False, True)
    for kind, by_head, *sizes in (
        ("bf16", True, 8, 64, 1, 2),
        ("bf16", False),
        ("bf16", True),
        ("fp16", False),
        ("fp32", False),
        ("bf16", False, 16, 128, 2),
        ("bf16", True, 8, 64, 1, 3),
        ("bf16", False, 4, 256, 4, 2),
    )
]
