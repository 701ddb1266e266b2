"""The rotation's kernels at the shapes of real models."""

from rptrain.kernels import rope
from tests.kernels.compiling import Variant

MODELS = {  # H, K, C, norms: Qwen3-1.7B, Qwen3-32B, Llama-3.1-8B, GPT-OSS, and heads of 32 and 256
    "qwen3-1.7b": (16, 8, 128, True),
    "qwen3-32b": (64, 8, 128, True),
    "llama-3.1-8b": (32, 8, 128, False),
    "gpt-oss": (64, 8, 64, False),
    "small": (4, 1, 32, True),
    "large": (16, 1, 256, True),
}


def constants(heads: int, kv_heads: int, size: int, norm: bool) -> tuple[dict[str, int], dict[str, int]]:
    tile = rope._tile(heads, size)
    warps = tile.pop("num_warps")
    return {"H": heads, "K": kv_heads, "NORM": norm, **tile}, {"num_warps": warps}


def forward(kind: str, *model: int) -> Variant:
    signature = dict.fromkeys(("qkv", "q", "k", "q_weight", "k_weight"), f"*{kind}")
    signature |= dict.fromkeys(("cos", "sin", "rstd"), "*fp32")
    signature |= {"eps": "fp32", "q_stride": "i32", "k_stride": "i32"}
    return Variant(rope._forward, signature, *constants(*model))


def backward(kind: str, *model: int) -> Variant:
    signature = dict.fromkeys(("dq", "dk", "dv", "qkv", "q_weight", "k_weight"), f"*{kind}")
    signature |= dict.fromkeys(("cos", "sin", "rstd", "partials"), "*fp32") | {"tokens": "i32"}
    signature |= {f"d{x}_{of}": "i32" for x in "qkv" for of in ("token", "head")}
    return Variant(rope._backward, signature, *constants(*model))


VARIANTS = [
    *(make("bf16", *model) for make in (forward, backward) for model in MODELS.values()),
    *(make(kind, *MODELS["qwen3-1.7b"]) for make in (forward, backward) for kind in ("fp16", "fp32")),
]
