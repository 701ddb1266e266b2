"""Low-rank adapters of experts: each row's product gains s (x A.T) B.T of its expert; gradients of A, B and x.

Suffixes as in kernels/reference/moe.py. A and B are laid out as PEFT has them: A [E * rank, in], an expert's rows
together, and B [out, rank * E], of which column k * E + e belongs to expert e. Nothing is kept for backward.
"""

import torch
from torch import Tensor

from rptrain.kernels.grouped import grouped_mm, grouped_mm_add, grouped_weight_grad


def add_grouped_lora(y_NM: Tensor, x_NK: Tensor, a: Tensor, b: Tensor, ends_E: Tensor, scale: float) -> None:
    """Adds the adapters' outputs to y_NM, the product of x_NK with the experts' weights."""
    experts = len(ends_E)
    h = grouped_mm(x_NK, _a_by_expert(a, experts).mT, ends_E).mul_(scale)
    grouped_mm_add(h, _b_by_expert(b, experts).contiguous(), ends_E, y_NM)


def grouped_lora_backward_input(
    dy_NM: Tensor, a: Tensor, b: Tensor, ends_E: Tensor, scale: float, dx_NK: Tensor
) -> Tensor:
    """Adds the adapters' part to dx_NK; returns dh [N, rank], the gradient of the product with A."""
    experts = len(ends_E)
    dh = grouped_mm(dy_NM, _b_by_expert(b, experts).contiguous().mT, ends_E).mul_(scale)
    grouped_mm_add(dh, _a_by_expert(a, experts), ends_E, dx_NK)
    return dh


def grouped_lora_backward_weights(
    dy_NM: Tensor, dh: Tensor, x_NK: Tensor, a: Tensor, ends_E: Tensor, scale: float, grad_a: Tensor, grad_b: Tensor
) -> None:
    """Adds the gradients of A and B to theirs, of the wide type; `dh` is that of `grouped_lora_backward_input`."""
    experts = len(ends_E)
    grouped_weight_grad(_a_by_expert(grad_a, experts), dh, x_NK, ends_E)
    h = grouped_mm(x_NK, _a_by_expert(a, experts).mT, ends_E).mul_(scale)
    strided = _b_by_expert(grad_b, experts)  # products are summed where columns lie together
    sums = torch.zeros_like(strided, memory_format=torch.contiguous_format)
    grouped_weight_grad(sums, h, dy_NM, ends_E)
    strided.add_(sums)


def add_to_weights(w_EKM: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Adds to the experts' weights what their adapters do; all of one type."""
    experts = len(w_EKM)
    for weight, low, high in zip(w_EKM, _a_by_expert(a, experts), _b_by_expert(b, experts), strict=True):
        weight.addmm_(low.t(), high, alpha=scale)


def _a_by_expert(a: Tensor, experts: int) -> Tensor:
    """A view [E, rank, in]."""
    return a.view(experts, -1, a.shape[1])


def _b_by_expert(b: Tensor, experts: int) -> Tensor:
    """A view [E, rank, out]."""
    return b.view(len(b), -1, experts).permute(2, 1, 0)
