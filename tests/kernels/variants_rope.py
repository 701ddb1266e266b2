"""The rotation's kernels at the shapes of real models."""

from typing import Any

from rptrain.kernels import rope
from tests.kernels.compiling import Variant

MODELS = {  # H, K, C, norms: Qwen3-1.7B, Qwen2.5-7B, Qwen3-32B, Llama-3.1-8B, GPT-OSS, and heads of 32, 64, 256 and 512
    "qwen3-1.7b": (16, 8, 128, True),
    "qwen2.5-7b": (28, 4, 128, False),
    "qwen3-32b": (64, 8, 128, True),
    "llama-3.1-8b": (32, 8, 128, False),
    "gpt-oss": (64, 8, 64, False),
    "small": (4, 1, 32, True),
    "medium": (16, 8, 64, True),
    "large": (16, 1, 256, True),
    "larger": (16, 8, 256, True),
    "largest": (16, 4, 512, True),
    "qwen3.5-27b": (24, 4, 256, True),
    "qwen3.5-35b-a3b": (16, 2, 256, True),
}


def forward(
    kind: str,
    heads: int,
    kv_heads: int,
    size: int,
    norm: bool,
    half_sums: bool = False,
    rotated: float = 1.0,
    factor: bool = False,
    gated: bool = False,
) -> Variant:
    """`rotated`: the share of the columns that are. `factor`: whether queries have a factor for each token.

    `gated`: with a gate behind each query, and zero-centered norms.
    """
    constants: dict[str, Any] = {"H": heads, "K": kv_heads, "NORM": norm, **rope._tile(heads, size)}
    constants |= {"PAIRS": int(rotated * size) // 2} | dict.fromkeys(
        ("ROW", "V_ROW"), _columns(heads, kv_heads, size, gated)
    )
    constants |= {"GATED": gated, "ZERO_CENTERED": gated}
    signature = dict.fromkeys(("qk", "values", "q", "k", "v", "q_weight", "k_weight"), f"*{kind}")
    signature |= dict.fromkeys(("cos", "sin", "rstd"), "*fp32")
    if half_sums:
        signature |= dict.fromkeys(("q", "k", "v"), "*fp16") | {"scales": "*fp32"}
    else:
        constants["scales"] = None
    _add_factor(signature, constants, factor)
    signature |= {"eps": "fp32", "q_stride": "i32", "k_stride": "i32"}
    return Variant(rope._forward, signature, constants, {"num_warps": constants.pop("num_warps")})


def backward(
    kind: str,
    heads: int,
    kv_heads: int,
    size: int,
    norm: bool,
    strided: bool = False,
    rotated: float = 1.0,
    factor: bool = False,
    gated: bool = False,
) -> Variant:
    """Of contiguous gradients, which are read 8 or 16 bytes at a time, or of `strided` ones."""
    sizes, _ = rope._backward_sizes(heads, kv_heads, size, norm, int(rotated * size) // 2)
    constants = {"H": heads, "K": kv_heads, "NORM": norm, **sizes}
    constants |= {"PAIRS": int(rotated * size) // 2, "ROW": _columns(heads, kv_heads, size, gated)}
    constants |= {"GATED": gated, "ZERO_CENTERED": gated}
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    signature = dict.fromkeys(("dq", "dk", "dv", "qkv", "q_weight", "k_weight"), f"*{kind}")
    signature |= dict.fromkeys(("cos", "sin", "rstd", "partials"), "*fp32")
    signature |= {"tokens": "i32", "count": "i32"}
    if strided:
        signature |= dict.fromkeys(rope.STRIDES, "i32")
    else:
        counts = {"q": heads, "k": kv_heads, "v": kv_heads}
        constants |= {f"d{x}_token": count * size for x, count in counts.items()}
        constants |= {f"d{x}_head": size for x in counts}
    _add_factor(signature, constants, factor)
    return Variant(rope._backward, signature, constants, options)


def _columns(heads: int, kv_heads: int, size: int, gated: bool) -> int:
    return ((1 + gated) * heads + 2 * kv_heads) * size


def _add_factor(signature: dict[str, str], constants: dict[str, Any], factor: bool) -> None:
    if factor:
        signature["query_factor"] = "*fp32"
    else:
        constants["query_factor"] = None


VARIANTS = [
    *(forward("bf16", *MODELS[name]) for name in ("qwen3-1.7b", "qwen3-32b", "llama-3.1-8b", "small", "large")),
    *(
        forward("bf16", *MODELS[name], half_sums=True)
        for name in ("qwen3-1.7b", "qwen3-32b", "llama-3.1-8b", "gpt-oss")
    ),
    forward("fp16", *MODELS["qwen3-1.7b"], half_sums=True),
    *(backward("bf16", *model) for model in MODELS.values()),
    *(make(kind, *MODELS["qwen3-1.7b"]) for make in (forward, backward) for kind in ("fp16", "fp32")),
    *(backward("fp32", *MODELS[name]) for name in ("small", "medium", "larger")),
    backward("bf16", *MODELS["qwen3-1.7b"], strided=True),
    *(make("bf16", *MODELS["qwen3-32b"], rotated=share) for make in (forward, backward) for share in (0.5, 0.0)),
    *(make("bf16", *MODELS["llama-3.1-8b"], factor=True) for make in (forward, backward)),
    *(
        make("bf16", *MODELS[name], rotated=0.25, gated=True)
        for make in (forward, backward)
        for name in ("qwen3.5-27b", "qwen3.5-35b-a3b")
    ),
    *(make("fp32", *MODELS["qwen3.5-27b"], rotated=0.25, gated=True) for make in (forward, backward)),
]
