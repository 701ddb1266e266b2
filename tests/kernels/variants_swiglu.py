"""SwiGLU's kernels at the shapes of real models."""

from typing import Any

from rptrain.kernels import swiglu
from rptrain.kernels.swiglu import Clamp
from tests.kernels.compiling import Variant


def constants(size: int, interleaved: bool, clamp: Clamp | None) -> tuple[dict[str, Any], dict[str, int]]:
    options = swiglu._launch(1, size, interleaved, clamp)[1]
    kept = ("SIZE", "BLOCK", "INTERLEAVED", "CLAMPED")
    return {name: options[name] for name in kept}, {"num_warps": options["num_warps"]}


def forward(kind: str, *form: Any) -> Variant:
    signature = {"gate_up": f"*{kind}", "out": f"*{kind}", "alpha": "fp32", "limit": "fp32"}
    return Variant(swiglu._forward, signature, *constants(*form))


def backward(kind: str, *form: Any) -> Variant:
    signature = dict.fromkeys(("dy", "gate_up", "out", "activation"), f"*{kind}") | {"alpha": "fp32", "limit": "fp32"}
    constant, options = constants(*form)
    return Variant(swiglu._backward, signature, constant | {"ACTIVATION": True}, options)


FORMS = [(6144, False, None), (14336, False, None), (2880, True, Clamp()), (2880, False, Clamp())]
VARIANTS = [
    *(make("bf16", *form) for make in (forward, backward) for form in FORMS),
    *(make(kind, *FORMS[0]) for make in (forward, backward) for kind in ("fp16", "fp32")),
]
