"""What kernels/fp8.py and activations in FP8 launch for real models, on the cards with FP8."""

from typing import Any

from rptrain.kernels import fp8, fp8_products, output_gate, swiglu
from rptrain.kernels.target import named
from tests.kernels import variants_output_gate
from tests.kernels.compiling import FP8_CARDS, Variant

SIZES = dict.fromkeys(("count", "padded", "stride", "rows", "columns"), "i32")
CODES = dict.fromkeys(("codes", "row_codes", "column_codes", "a", "b"), "*fp8e4nv")
FACTORS = dict.fromkeys(("factors", "column_factors", "row_factors"), "*fp32")
SCALES = dict.fromkeys(("scales", "row_scales", "column_scales", "a_scales", "b_scales"), "*fp32")
COMMON = SIZES | CODES | FACTORS | SCALES | dict.fromkeys(("maxima", "row_maxima", "column_maxima"), "*i32")


def rows(size: int, kind: str, factors: bool) -> Variant:
    constants = {"SIZE": size, "STRIDE": size, "FACTORS": factors} | fp8.row_block(size)
    options = {"num_warps": constants.pop("num_warps")}
    return Variant(fp8._rows_kernel, COMMON | {"x": f"*{kind}"}, constants, options, FP8_CARDS)


def both(kernel: Any, kind: str, rows: int, columns: int) -> Variant:
    flags = dict.fromkeys(("BY_ROW", "COLUMN_FACTORS", "ROW_FACTORS"), True)
    return Variant(
        kernel,
        COMMON | {"x": f"*{kind}"},
        flags | {"SIZE": 4096, "STRIDE": 4096, "ROWS": rows, "COLUMNS": columns},
        {},
        FP8_CARDS,
    )


def transposed(kind: str) -> Variant:
    constants = {"SIZE": 14336, "STRIDE": 14336, "ROWS": 64, "COLUMNS": 64}
    return Variant(fp8._transposed_codes_kernel, COMMON | {"x": f"*{kind}"}, constants, {}, FP8_CARDS)


def product(card: int | str, inner: int, kind: str, add: bool) -> Variant:
    target = named(card)
    tiles = fp8_products.tiles(inner % fp8_products.TERMS == 0, target)
    constants = fp8_products.constants(tiles, target, add)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    strides = {"OUT_STRIDE": 4096, "A_STRIDE": inner, "B_STRIDE": inner, "K": inner}
    signature = COMMON | {"out": f"*{kind}"}
    return Variant(fp8_products._product_kernel, signature, constants | strides, options, (card,), promoted=not add)


def output_gate_rows(kind: str, heads: int, kv_heads: int, size: int) -> Variant:
    constants = variants_output_gate.options(heads, kv_heads, size) | output_gate._row(heads * size)
    launch = {"num_warps": constants.pop("num_warps")}
    signature = dict.fromkeys(("out", "gate"), f"*{kind}") | {"codes": "*fp8e4nv", "scales": "*fp32"}
    return Variant(output_gate._forward_rows, signature, constants, launch, FP8_CARDS)


def swiglu_rows(kind: str, size: int) -> Variant:
    constant = {"SIZE": size, **swiglu._row(size)}
    options = {"num_warps": constant.pop("num_warps")}
    signature = {"gate_up": f"*{kind}", "codes": "*fp8e4nv", "scales": "*fp32"}
    return Variant(swiglu._forward_rows, signature, constant, options, FP8_CARDS)


def swiglu_backward(kind: str, size: int) -> Variant:
    constant = {"SIZE": size, **swiglu._tiles()}
    options = {"num_warps": constant.pop("num_warps")}
    signature = dict.fromkeys(("dy", "gate_up"), f"*{kind}") | {"tokens": "i32"}
    signature |= dict.fromkeys(("column_factors", "row_factors"), "*fp32")
    signature |= dict.fromkeys(("row_maxima", "column_maxima", "activation_maxima"), "*i32")
    return Variant(swiglu._backward_measured, signature, constant, options, FP8_CARDS)


TRANSPOSED = {"codes": "*u8", "out": "*u8"}
VARIANTS = [
    *(rows(size, "bf16", factors) for size in (4096, 14336, 28672) for factors in (False, True)),
    rows(4096, "fp32", True),
    *(both(fp8._maxima_kernel, kind, 128, 64) for kind in ("bf16", "fp32")),
    *(both(fp8._codes_kernel, kind, 32, 128) for kind in ("bf16", "fp32")),
    *(transposed(kind) for kind in ("bf16", "fp32")),
    Variant(fp8._transpose_kernel, SIZES | TRANSPOSED, {"SIZE": 4096, "ROWS": 64, "COLUMNS": 64}, {}, FP8_CARDS),
    *(product(card, inner, "bf16", False) for card in FP8_CARDS for inner in (4096, 14336, 300)),
    *(product(card, 8192, "fp32", True) for card in FP8_CARDS),
    *(swiglu_rows("bf16", size) for size in (1536, 6144, 14336, 28672)),
    swiglu_rows("fp32", 14336),
    *(output_gate_rows("bf16", *model) for model in variants_output_gate.MODELS.values()),
    *(swiglu_backward(kind, 14336) for kind in ("bf16", "fp32")),
]
