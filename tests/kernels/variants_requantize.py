"""What kernels/requantize.py launches for Llama-3.1-8B and for rows of any length, on the cards with FP8."""

import torch

from rptrain.kernels import quant, requantize
from tests.kernels.compiling import FP8_CARDS, Variant


def variant(fmt: quant.Format, size: int, dtype: torch.dtype) -> Variant:
    constants = requantize.constants(fmt, size, dtype)
    options = {"num_warps": constants.pop("num_warps")}
    codes, scales = ("*i8" if fmt.bits == 8 else "*u8"), ("*u8" if fmt is quant.MXFP4 else "*fp32")
    signature = {"codes": codes, "scales": scales, "table": "*fp32", "out_codes": "*fp8e4nv", "out_scales": "*fp32"}
    return Variant(requantize._kernel, signature, constants, options, FP8_CARDS)


VARIANTS = [
    variant(fmt, size, dtype)
    for fmt in quant.FORMATS.values()
    for size in (4096, 14336, 80)
    for dtype in (torch.bfloat16, torch.float32)
]
