"""The norm's kernels at the shapes of real models."""

from rptrain.kernels import rms_norm
from tests.kernels.compiling import FP8_CARDS, Variant


def split(options: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The constants, and what is no argument of a kernel."""
    return options, {"num_warps": options.pop("num_warps")}


def forward(
    size: int, kind: str, add: bool, plain: bool = True, codes: bool = False, stride: int = 0, centered: bool = False
) -> Variant:
    constants, options = split(rms_norm._row(size))
    signature = dict.fromkeys(("x", "residual", "total", "weight", "y"), f"*{kind}") | {"rstd": "*fp32", "eps": "fp32"}
    constants |= {"ADD": add, "PLAIN": plain, "CODES": codes, "X_STRIDE": stride or size, "Y_STRIDE": stride or size}
    constants["ZERO_CENTERED"] = centered
    if not codes:
        return Variant(rms_norm._forward, signature, constants | {"codes": None, "scales": None}, options)
    signature |= {"codes": "*fp8e4nv", "scales": "*fp32"}
    return Variant(rms_norm._forward, signature, constants, options, FP8_CARDS)


def backward(size: int, kind: str, residual: bool, stride: int = 0, centered: bool = False) -> Variant:
    sizes = rms_norm._backward_sizes(size, 4 if kind == "fp32" else 2)
    constants, options = split(rms_norm._tile(size, sizes))
    signature = dict.fromkeys(("dy", "x", "weight", "dresidual", "dx"), f"*{kind}")
    signature |= {"rstd": "*fp32", "partials": "*fp32", "rows": "i32"}
    constants |= {"RESIDUAL": residual, "X_STRIDE": stride or size, "DY_STRIDE": stride or size}
    constants["ZERO_CENTERED"] = centered
    return Variant(rms_norm._backward, signature, constants, options)


def add_partials(size: int, count: int, programs: int) -> Variant:
    constants, options = split({"COUNT": count, "SIZE": size, "COLUMNS": 16, **rms_norm._lanes(programs, 16)})
    signature = {"partials": "*fp32", "first": "*fp32", "second": "*fp32", "rows": "i32"}
    return Variant(rms_norm._add_partials, signature, constants, options)


VARIANTS = [
    *(make(size, "bf16", flag) for make in (forward, backward) for size in (2048, 4096) for flag in (False, True)),
    *(make(2880, "bf16", True) for make in (forward, backward)),
    *(make(4096, "fp16", True) for make in (forward, backward)),
    *(make(8192, "fp32", True) for make in (forward, backward)),
    *(forward(4096, "bf16", True, plain, codes=True) for plain in (False, True)),
    forward(8192, "fp32", True, False, codes=True),
    *(backward(size, "bf16", True) for size in (1024, 8192)),
    *(backward(size, "fp32", True) for size in (1024, 2048, 4096)),
    *(make(size, "bf16", False, stride=8192) for make in (forward, backward) for size in (6144, 1024)),
    *(make(5120, "bf16", True, centered=True) for make in (forward, backward)),
    forward(4096, "bf16", True, False, codes=True, centered=True),
    backward(2048, "fp32", False, centered=True),
    add_partials(4096, 1, 264),
    add_partials(128, 2, 132),
]
