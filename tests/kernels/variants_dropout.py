"""What kernels/dropout.py launches: at hidden and intermediate sizes, into each type, added or not."""

from rptrain.kernels import dropout
from rptrain.kernels.launch import power_of_2
from rptrain.kernels.reference.dropout import ROUNDS
from tests.kernels.compiling import Variant

SCALARS = {"numbers": "*i64", "length": "i32", "place": "i32", "threshold": "i32", "scale": "fp32"}
VARIANTS = [
    Variant(
        dropout._dropout_kernel,
        SCALARS | {"x": dtype, "out": dtype},
        {
            "WIDTH": width,
            "GROUPS": width // 8,
            "ADD": add,
            "ROUNDS": ROUNDS,
            "BLOCK": min(power_of_2(width // 8), dropout.BLOCK),
        },
        {"num_warps": 4},
    )
    for width in (2048, 14336)
    for dtype in ("*bf16", "*fp32")
    for add in (False, True)
]
