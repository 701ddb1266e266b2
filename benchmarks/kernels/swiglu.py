"""SwiGLU at the intermediate sizes of Qwen3-1.7B and Llama-3.1-8B, and GPT-OSS's form of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.swiglu import Clamp, swiglu, swiglu_backward

TOKENS = 8192
SIZES = {"Qwen3-1.7B": 6144, "Llama-3.1-8B": 14336}


def cases() -> list[Case]:
    return [
        *(case for name, size in SIZES.items() for case in _cases(name, size)),
        *_cases("GPT-OSS, interleaved", 2880, interleaved=True, clamp=Clamp()),
    ]


def _cases(name: str, size: int, **form: Any) -> list[Case]:
    torch.manual_seed(0)
    gate_up = torch.randn(TOKENS, 2 * size, device="cuda", dtype=torch.bfloat16)
    dy, activation = torch.randn(2, TOKENS, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(gate_up)
    forward, backward = torch.compile(reference.swiglu), torch.compile(reference.swiglu_backward)

    def back(function: Callable[..., Tensor], activation: Tensor | None = None) -> Tensor:
        return function(dy, gate_up, out, activation, **form)

    liger = {} if form else _liger(gate_up, dy)
    return [
        Case(
            f"SwiGLU, {name}",
            lambda: swiglu(gate_up, **form),
            {"eager": lambda: reference.swiglu(gate_up, **form), "compiled": lambda: forward(gate_up, **form)}
            | liger.get("forward", {}),
            gate_up.nbytes + dy.nbytes,
        ),
        Case(
            f"SwiGLU backward, {name}",
            lambda: back(swiglu_backward),
            {"eager": lambda: back(reference.swiglu_backward), "compiled": lambda: back(backward)}
            | liger.get("backward", {}),
            2 * gate_up.nbytes + dy.nbytes,
        ),
        Case(
            f"SwiGLU backward with the activation, {name}",
            lambda: back(swiglu_backward, activation),
            {
                "eager": lambda: back(reference.swiglu_backward, activation),
                "compiled": lambda: back(backward, activation),
            },
            2 * gate_up.nbytes + 2 * dy.nbytes,
        ),
    ]


def _liger(gate_up: Tensor, dy: Tensor) -> dict[str, dict[str, Callable[[], object]]]:
    """Of gate and up in tensors of their own."""
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return {}
    gate, up = (half.contiguous().requires_grad_() for half in gate_up.chunk(2, -1))
    product = LigerSiLUMulFunction.apply(gate, up)
    return {
        "forward": {"liger": lambda: LigerSiLUMulFunction.apply(gate.detach(), up.detach())},
        "backward": {"liger": lambda: torch.autograd.grad(product, (gate, up), dy, retain_graph=True)},
    }
