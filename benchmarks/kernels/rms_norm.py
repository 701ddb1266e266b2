"""The norm and its backward at the hidden sizes of Qwen3-1.7B and Llama-3.1-8B, with and without the residual."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_triton

TOKENS = 8192
SIZES = {"Qwen3-1.7B": 2048, "Llama-3.1-8B": 4096}
EPS = 1e-6


def cases() -> list[Case]:
    return [case for name, size in SIZES.items() for case in _cases(name, size)]


def _cases(name: str, size: int) -> list[Case]:
    torch.manual_seed(0)
    x, residual, dy = torch.randn(3, TOKENS, size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    sums = torch.zeros(size, device="cuda")
    rstd = rms_norm(x, weight, EPS)[1]
    compiled = {
        function: torch.compile(function)
        for function in (reference.rms_norm, _add_rms_norm, reference.rms_norm_backward)
    }

    def case(what: str, ours: Callable, reference: Callable, tensors: int, *inputs: object) -> Case:
        return Case(
            f"{what}, {name}",
            lambda: ours(*inputs),
            {"eager": lambda: reference(*inputs), "compiled": lambda: compiled[reference](*inputs)}
            | liger.get(what, {}),
            tensors * x.nbytes,
        )

    liger = _liger(x, weight, dy)
    return [
        case("norm", rms_norm, reference.rms_norm, 2, x, weight, EPS),
        case("residual and norm", rms_norm_triton, _add_rms_norm, 4, x, residual, weight, EPS),
        case("norm backward", rms_norm_backward, reference.rms_norm_backward, 3, dy, x, weight, rstd, sums),
        case(
            "norm backward and residual", rms_norm_backward, reference.rms_norm_backward, 4,
            dy, x, weight, rstd, sums, residual,
        ),
    ]  # fmt: skip


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    return total, *reference.rms_norm(total, weight, eps)


def _liger(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, dict[str, Callable[[], object]]]:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        return {}
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = LigerRMSNormFunction.apply(*leaves, EPS, 0.0, "llama", False)
    return {
        "norm": {"liger": lambda: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)},
        "norm backward": {"liger": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)},
    }
