"""What kernels/quant.py launches: each format into each type, codes as words and byte by byte, rows of any length."""

from rptrain.kernels import quant
from tests.kernels.compiling import Variant


def _4bit(fmt: quant.Format, out: str, words: bool) -> Variant:
    scales = "*fp32" if fmt is quant.NF4 else "*u8"
    signature = {"codes": "*u8", "scales": scales, "table": "*fp32", "numel": "i64", "out": out}
    constants = quant.constants(fmt, words)
    options = {"num_warps": constants.pop("num_warps")}
    return Variant(quant._4bit_kernel, signature, constants, options)


def _int8(out: str) -> Variant:
    signature = {"codes": "*i8", "scales": "*fp32", "numel": "i64", "out": out}
    sizes = {"BLOCK": quant.INT8.block, "ROWS": quant.ELEMENTS // quant.INT8.block}
    return Variant(quant._int8_kernel, signature, sizes, {"num_warps": 4})


def _fp8(out: str, size: int) -> Variant:
    signature = {"codes": "*i8", "scales": "*fp32", "numel": "i64", "out": out}
    return Variant(quant._fp8_kernel, signature, {"SIZE": size, "ELEMENTS": quant.ELEMENTS}, {"num_warps": 4})


VARIANTS = [
    *(_4bit(quant.NF4, out, words) for out in ("*bf16", "*fp32") for words in (True, False)),
    *(_4bit(quant.MXFP4, out, words) for out in ("*bf16", "*fp32") for words in (True, False)),
    *(_int8(out) for out in ("*bf16", "*fp32")),
    *(_fp8(out, size) for out in ("*bf16", "*fp16", "*fp32") for size in (4096, 14336, 77)),
]
