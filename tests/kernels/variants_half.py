"""What kernels/half.py launches for the heads of Qwen3-1.7B and of GPT-2, and for attention's operands."""

from rptrain.kernels import half
from tests.kernels.compiling import Variant

CARDS = (80, 86, 89, 90, 120)


def heads(kind: str, size: int) -> Variant:
    types = {"x": f"*{kind}", "values": "*fp16", "scales": "*fp32", "tokens": "i32"}
    constants = {"STRIDE": 4096, "C": size, "BLOCK_C": half.power_of_2(size), "ROWS": 4096 // half.power_of_2(size)}
    return Variant(half._heads_kernel, types, constants, {}, CARDS)


def products(kind: str, hidden: int, vocab: int, tokens: int) -> list[Variant]:
    """Logits, the gradient of the hidden state, and that of the projection."""
    by_row, width = {"A_TERM": 1, "B_TERM": 1}, -(-vocab // 64) * 64
    return [
        product(kind, kind, hidden, vocab, width, {"A_ROW": hidden, "B_ROW": hidden} | by_row),
        product(kind, kind, vocab, hidden, hidden, {"A_ROW": width, "A_TERM": 1, "B_ROW": 1, "B_TERM": hidden}),
        product(
            kind, "fp32", tokens, hidden, hidden, {"A_ROW": 1, "A_TERM": width, "B_ROW": 1, "B_TERM": hidden}, add=True
        ),
    ]


def product(
    kind: str, out: str, inner: int, columns: int, stride: int, strides: dict[str, int], *, add: bool = False
) -> Variant:
    tiles = half.WHOLE if inner % half.WHOLE.terms == 0 else half.UNEVEN
    constants = half.constants(tiles, inner, add)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    types = {"out": f"*{out}", "a": f"*{kind}", "b": f"*{kind}", "rows": "i32", "inner": "i32"}
    constants |= strides | {"COUNT": columns, "OUT_STRIDE": stride}
    return Variant(half._product_kernel, types, constants, options, CARDS, half_sums=True)


VARIANTS = [
    *products("bf16", 2048, 151936, 4096),
    *products("fp16", 768, 50257, 1000),
    heads("bf16", 128),
    heads("fp16", 80),
]
