"""Rotation and norms of queries and keys at the shapes of Qwen3-1.7B (norms) and Llama-3.1-8B (none)."""

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.rope import QKNorm, qk_norm_rope, qk_norm_rope_backward
from rptrain.models.layers import rope

TOKENS = 8192
SHAPES = {"Qwen3-1.7B": (16, 8, 128, True), "Llama-3.1-8B": (32, 8, 128, False)}  # H, K, C, norms


def cases() -> list[Case]:
    return [case for name, shape in SHAPES.items() for case in _cases(name, *shape)]


def _cases(name: str, heads: int, kv_heads: int, size: int, normed: bool) -> list[Case]:
    """In place: what is rotated once more, or written over, costs the same."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    qkv = torch.randn(TOKENS, (heads + 2 * kv_heads) * size, **options)
    settings = rope.parameters({"rope_theta": 1e6})
    frequencies = torch.tensor(rope.inverse_frequencies(settings, size), device="cuda")
    rotation = rope.tables(frequencies, torch.arange(TOKENS, device="cuda") % 2048)
    tables = sum(table.nbytes for table in rotation)
    norm = QKNorm(*torch.randn(2, size, **options), 1e-6) if normed else None
    grads = (torch.zeros(size, device="cuda"), torch.zeros(size, device="cuda")) if normed else None
    rstd = qk_norm_rope(qkv, rotation, kv_heads, size, norm)[3]
    dq, dk, dv = (torch.randn(TOKENS, count, size, **options) for count in (heads, kv_heads, kv_heads))
    forward, backward = torch.compile(reference.qk_norm_rope), torch.compile(reference.qk_norm_rope_backward)

    def on(function) -> Tensor:
        return function(qkv, rotation, kv_heads, size, norm)

    def back(function) -> Tensor:
        return function(dq, dk, dv, qkv, rotation, norm, rstd, grads)

    return [
        Case(
            f"rotation{' with norms' * normed}, {name}",
            lambda: on(qk_norm_rope),
            {"eager": lambda: on(reference.qk_norm_rope), "compiled": lambda: on(forward)},
            2 * (dq.nbytes + dk.nbytes) + tables,
        ),
        Case(
            f"rotation{' with norms' * normed} backward, {name}",
            lambda: back(qk_norm_rope_backward),
            {"eager": lambda: back(reference.qk_norm_rope_backward), "compiled": lambda: back(backward)},
            (2 + normed) * (dq.nbytes + dk.nbytes) + 2 * dv.nbytes + tables,
        ),
    ]
