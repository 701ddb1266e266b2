"""The softmax of the loss at the vocabularies of real models, and at a small one."""

from rptrain.kernels import linear_cross_entropy as lce
from rptrain.kernels.target import named
from tests.kernels.compiling import AMD, ARCHITECTURES, Variant

ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def variants(vocab: int, dtype: str, gradient: bool) -> list[Variant]:
    """As the cut of the row depends on the card."""
    by_card: dict[lce.Sizes, list[int | str]] = {}
    for architecture in (*ARCHITECTURES, *AMD):
        cut = lce.sizes(vocab, ITEMSIZES[dtype], gradient, named(architecture))
        by_card.setdefault(cut, []).append(architecture)
    return [_variant(vocab, dtype, gradient, cut, tuple(cards)) for cut, cards in by_card.items()]


def _variant(vocab: int, dtype: str, gradient: bool, cut: lce.Sizes, cards: tuple[int | str, ...]) -> Variant:
    constants = lce.constants(vocab, ITEMSIZES[dtype], gradient, cut)
    options = {"num_warps": constants.pop("num_warps")}
    statistics = {"losses": "*fp32", "lse": "*fp32", "scale": "fp32", "tokens": "i32"}
    signature = {"logits": f"*{dtype}", "labels": "*i64"} | statistics
    return Variant(lce._cross_entropy_kernel, signature, constants, options, cards)


VARIANTS = [
    *(each for vocab in (100, 32000, 50257, 128256, 151936, 201088) for each in variants(vocab, "bf16", True)),
    *variants(151936, "fp16", True),
    *variants(128256, "fp32", True),
    *variants(151936, "bf16", False),
    *variants(201088, "fp32", False),
]
