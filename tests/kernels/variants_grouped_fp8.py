"""What kernels/grouped_fp8.py launches for Qwen3-MoE and GPT-OSS, on the cards with FP8."""

from typing import Any

from rptrain.kernels import fp8, grouped_fp8
from rptrain.kernels.target import named
from tests.kernels.compiling import Variant
from tests.kernels.variants_fp8 import FP8_CARDS

EXPERTS = 128
SIZES = dict.fromkeys(("experts", "blocks"), "i32")
CODES = dict.fromkeys(("a", "b", "codes"), "*fp8e4nv")
FLOATS = dict.fromkeys(("factors", "scales", "a_scales", "b_scales", "acc"), "*fp32")
COMMON = SIZES | CODES | FLOATS | {"ends": "*i32", "maxima": "*i32"}


def rows(size: int, kind: str) -> Variant:
    constants = {"SIZE": size, "STRIDE": size, "EXPERTS": EXPERTS} | fp8.row_block(size)
    options = {"num_warps": constants.pop("num_warps")}
    return Variant(grouped_fp8._grouped_rows_kernel, COMMON | {"x": f"*{kind}"}, constants, options, FP8_CARDS)


def by_block(kernel: Any, kind: str, **types: str) -> Variant:
    _, constants = grouped_fp8._by_block(1, 2048, EXPERTS)
    options = {"num_warps": constants.pop("num_warps")}
    signature = COMMON | {"x": f"*{kind}"} | types
    strides = {"STRIDE": 2048} if "STRIDE" in kernel.arg_names else {}
    return Variant(kernel, signature, constants | strides, options, FP8_CARDS)


def _constants(card: int | str, inner: int) -> tuple[dict[str, Any], dict[str, int]]:
    constants = grouped_fp8.product_constants(inner, named(card))
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    return constants | {"EXPERTS": EXPERTS}, options


def product(card: int | str, inner: int, outer: int, kind: str, scaled: bool) -> Variant:
    constants, options = _constants(card, inner)
    constants |= {"K": inner, "M": outer, "B_SCALES": scaled, "BIAS": True}
    signature = COMMON | {"out": f"*{kind}", "bias": f"*{kind}"}
    return Variant(grouped_fp8._grouped_product_kernel, signature, constants, options, (card,))


def accumulate(card: int | str, inner: int, outer: int) -> Variant:
    constants, options = _constants(card, grouped_fp8.SEGMENT)
    constants |= {"R": outer, "C": inner}
    return Variant(grouped_fp8._grouped_accumulate_kernel, COMMON, constants, options, (card,))


VARIANTS = [
    *(rows(size, kind) for size in (768, 5760) for kind in ("bf16", "fp32")),
    *(by_block(grouped_fp8._grouped_maxima_kernel, kind) for kind in ("bf16", "fp32")),
    *(by_block(grouped_fp8._grouped_codes_kernel, kind) for kind in ("bf16", "fp32")),
    by_block(grouped_fp8._grouped_transpose_kernel, "bf16", codes="*u8", out="*u8"),
    *(product(card, *sizes, "bf16", True) for card in FP8_CARDS for sizes in ((2048, 1536), (2880, 5760), (48, 64))),
    *(product(card, 768, 2048, "fp32", False) for card in FP8_CARDS),
    *(accumulate(card, *sizes) for card in FP8_CARDS for sizes in ((2048, 1536), (2880, 5760))),
]
