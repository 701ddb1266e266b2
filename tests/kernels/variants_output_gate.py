"""The output gate's kernels at the shapes of real models. Those in FP8 are in variants_fp8.py."""

from typing import Any

import torch

from rptrain.kernels import output_gate
from rptrain.kernels.reference.dense import split_gates
from tests.kernels.compiling import Variant

MODELS = {"qwen3.5-27b": (24, 4, 256), "qwen3.5-35b-a3b": (16, 2, 256), "small": (4, 2, 80)}  # H, K, C


def options(heads: int, kv_heads: int, size: int) -> dict[str, Any]:
    """Of a launch."""
    qkv = torch.empty(1, (2 * heads + 2 * kv_heads) * size)
    return output_gate._launch(torch.empty(1, heads, size), split_gates(qkv, kv_heads, size))[1]


def variants(kind: str, heads: int, kv_heads: int, size: int) -> list[Variant]:
    constants = options(heads, kv_heads, size)
    launch = {"num_warps": constants.pop("num_warps")}
    kernels = {output_gate._forward: ("out", "gate", "gated"), output_gate._backward: ("dy", "out", "gate", "dout")}
    return [Variant(kernel, dict.fromkeys(names, f"*{kind}"), constants, launch) for kernel, names in kernels.items()]


VARIANTS = [variant for model in MODELS.values() for variant in variants("bf16", *model)]
VARIANTS += [variant for kind in ("fp16", "fp32") for variant in variants(kind, *MODELS["qwen3.5-27b"])]
