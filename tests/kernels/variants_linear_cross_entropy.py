"""The softmax of the loss at the vocabularies of real models, and at an odd one."""

from rptrain.kernels import linear_cross_entropy as lce
from tests.kernels.compiling import Variant

ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def variant(vocab: int, dtype: str, gradient: bool) -> Variant:
    block, warps = lce.sizes(vocab, ITEMSIZES[dtype])
    statistics = {"losses": "*fp32", "lse": "*fp32", "scale": "fp32"}
    return Variant(
        lce._cross_entropy_kernel,
        {"logits": f"*{dtype}", "labels": "*i64"} | statistics,
        {
            "GRADIENT": gradient,
            "IGNORED": -100,
            "VOCAB": vocab,
            "WIDTH": -(-vocab // lce.ALIGNMENT) * lce.ALIGNMENT,
            "BLOCK": block,
            "SPAN": 16 // ITEMSIZES[dtype],
        },
        {"num_warps": warps},
    )


VARIANTS = [
    variant(vocab, dtype, gradient)
    for vocab in (32000, 50257, 128256, 151936, 202047)
    for dtype in ("bf16", "fp32")
    for gradient in (True, False)
] + [variant(151936, "fp16", True), variant(100, "bf16", True)]
