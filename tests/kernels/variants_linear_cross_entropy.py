"""The softmax of the loss at the vocabularies of real models, and at a small one."""

from rptrain.kernels import linear_cross_entropy as lce
from tests.kernels.compiling import Variant

ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def variant(vocab: int, dtype: str, gradient: bool) -> Variant:
    itemsize = ITEMSIZES[dtype]
    constants = lce.constants(vocab, itemsize, gradient, lce.sizes(vocab, itemsize, gradient))
    options = {"num_warps": constants.pop("num_warps")}
    statistics = {"losses": "*fp32", "lse": "*fp32", "scale": "fp32", "tokens": "i32"}
    signature = {"logits": f"*{dtype}", "labels": "*i64"} | statistics
    return Variant(lce._cross_entropy_kernel, signature, constants, options)


VARIANTS = [
    *(variant(vocab, "bf16", True) for vocab in (100, 32000, 50257, 128256, 151936, 201088)),
    variant(151936, "fp16", True),
    variant(128256, "fp32", True),
    variant(151936, "bf16", False),
    variant(201088, "fp32", False),
]
