"""The norm's kernels at the shapes of real models."""

from rptrain.kernels import rms_norm
from tests.kernels.compiling import Variant


def row(size: int) -> tuple[dict[str, int], dict[str, int]]:
    constants = rms_norm._row(size)
    return constants, {"num_warps": constants.pop("num_warps")}


def forward(size: int, kind: str, add: bool) -> Variant:
    constants, options = row(size)
    signature = dict.fromkeys(("x", "residual", "total", "weight", "y"), f"*{kind}") | {"rstd": "*fp32", "eps": "fp32"}
    return Variant(rms_norm._forward, signature, constants | {"ADD": add}, options)


def backward(size: int, kind: str, residual: bool) -> Variant:
    constants, options = row(size)
    signature = dict.fromkeys(("dy", "x", "weight", "dresidual", "dx"), f"*{kind}")
    signature |= {"rstd": "*fp32", "partials": "*fp32", "rows": "i32"}
    return Variant(rms_norm._backward, signature, constants | {"RESIDUAL": residual}, options)


def add_partials(size: int, count: int) -> Variant:
    return Variant(
        rms_norm._add_partials,
        {"partials": "*fp32", "first": "*fp32", "second": "*fp32", "rows": "i32"},
        {"COUNT": count, "SIZE": size, "ROWS": 64, "COLUMNS": 32},
        {"num_warps": 4},
    )


VARIANTS = [
    *(make(size, "bf16", flag) for make in (forward, backward) for size in (2048, 4096) for flag in (False, True)),
    *(make(2880, "bf16", True) for make in (forward, backward)),
    *(make(4096, "fp16", True) for make in (forward, backward)),
    *(make(8192, "fp32", True) for make in (forward, backward)),
    add_partials(4096, 1),
    add_partials(128, 2),
]
