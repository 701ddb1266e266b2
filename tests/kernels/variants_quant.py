"""What kernels/quant.py launches: each format into each type."""

from rptrain.kernels import quant
from tests.kernels.compiling import Variant

COMMON = {"scales": "*fp32", "numel": "i64"}
SIGNATURES = {
    "nf4": (quant._nf4_kernel, COMMON | {"codes": "*u8", "table": "*fp32"}),
    "mxfp4": (quant._mxfp4_kernel, COMMON | {"codes": "*u8", "scales": "*u8"}),
    "int8": (quant._int8_kernel, COMMON | {"codes": "*i8"}),
}
VARIANTS = [
    Variant(
        kernel,
        signature | {"out": out},
        {"BLOCK": fmt.block, "ROWS": quant.ELEMENTS // fmt.block},
        {"num_warps": 4},
    )
    for fmt in quant.FORMATS.values()
    for kernel, signature in [SIGNATURES[fmt.name]]
    for out in ("*bf16", "*fp32")
]
