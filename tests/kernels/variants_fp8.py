"""What kernels/fp8.py launches for Llama-3.1-8B, on the cards with FP8."""

from typing import Any

from rptrain.kernels import fp8
from tests.kernels.compiling import Variant

FP8_CARDS = (89, 90, 120)
SIZES = dict.fromkeys(("count", "padded", "stride", "rows", "columns"), "i32")
CODES = dict.fromkeys(("codes", "row_codes", "column_codes", "a", "b"), "*fp8e4nv")
FACTORS = dict.fromkeys(("factors", "column_factors", "row_factors"), "*fp32")
SCALES = dict.fromkeys(("scales", "row_scales", "column_scales", "a_scales", "b_scales"), "*fp32")
COMMON = SIZES | CODES | FACTORS | SCALES | {"maxima": "*i32"}


def rows(size: int, kind: str, factors: bool) -> Variant:
    constants = {"SIZE": size, "STRIDE": size, "FACTORS": factors} | fp8._block(size)
    options = {"num_warps": constants.pop("num_warps")}
    return Variant(fp8._rows_kernel, COMMON | {"x": f"*{kind}"}, constants, options, FP8_CARDS)


def both(kernel: Any, kind: str, tile: int) -> Variant:
    flags = dict.fromkeys(("BY_ROW", "COLUMN_FACTORS", "ROW_FACTORS"), True)
    return Variant(
        kernel,
        COMMON | {"x": f"*{kind}"},
        flags | {"SIZE": 4096, "STRIDE": 4096, "ROWS": tile, "COLUMNS": 64},
        {},
        FP8_CARDS,
    )


def product(card: int, inner: int, kind: str, add: bool) -> Variant:
    hopper = card == 90
    constants = fp8.constants(fp8.UNEVEN if inner % fp8.TERMS else fp8.HOPPER if hopper else fp8.ADA, hopper, add)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    strides = {"OUT_STRIDE": 4096, "A_STRIDE": inner, "B_STRIDE": inner, "K": inner}
    return Variant(fp8._product_kernel, COMMON | {"out": f"*{kind}"}, constants | strides, options, (card,))


TRANSPOSED = {"codes": "*u8", "out": "*u8"}
VARIANTS = [
    *(rows(size, "bf16", factors) for size in (4096, 14336, 28672) for factors in (False, True)),
    rows(4096, "fp32", True),
    *(both(fp8._maxima_kernel, kind, 128) for kind in ("bf16", "fp32")),
    *(both(fp8._codes_kernel, kind, 64) for kind in ("bf16", "fp32")),
    Variant(fp8._transpose_kernel, SIZES | TRANSPOSED, {"SIZE": 4096, "ROWS": 64, "COLUMNS": 64}, {}, FP8_CARDS),
    *(product(card, inner, "bf16", False) for card in FP8_CARDS for inner in (4096, 14336, 300)),
    *(product(card, 8192, "fp32", True) for card in FP8_CARDS),
]
