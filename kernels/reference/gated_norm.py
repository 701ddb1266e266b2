"""Root-mean-square norm of heads with a gate, in plain PyTorch."""

import torch
from torch import Tensor

from rptrain.kernels.reference.dense import rms_norm, rms_norm_backward, wide


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """silu(z) * norm(x), [T, H V]; the norm is rounded where `rms_norm` rounds it."""
    gate = z.reshape(x.shape).to(wide(x.dtype))
    return (gate * torch.sigmoid(gate) * rms_norm(x, weight, eps)[0]).to(x.dtype).flatten(1)


def gated_norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, into: Tensor, grad_weight: Tensor | None
) -> Tensor:
    """dx like x; writes dz to `into`, and adds the weight's gradient to `grad_weight` [V], if any."""
    dtype = wide(x.dtype)
    gate, dy = z.reshape(x.shape).to(dtype), dy.view(x.shape).to(dtype)
    sigmoid = torch.sigmoid(gate)
    x_wide = x.to(dtype)
    normed, rstd = rms_norm(x_wide, weight.to(dtype), eps)
    dx = rms_norm_backward(dy * gate * sigmoid, x_wide, weight, rstd, grad_weight)
    into.copy_((dy * normed * sigmoid * (1 + gate * (1 - sigmoid))).view(into.shape))
    return dx.to(x.dtype)
