"""The decay and the write strength of a gated delta net, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels.reference.dense import wide


def gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """decay and beta [T, H] in the wide type."""
    dtype = wide(b.dtype)
    decay = -a_log.to(dtype).exp() * F.softplus(a.flatten(1).to(dtype) + dt_bias)
    return decay, b.flatten(1).sigmoid().to(dtype)


def gates_backward(
    ddecay: Tensor,
    dbeta: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    into: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
) -> None:
    """Writes db and da to `into`, and adds the gradients of a_log and dt_bias to `grads` [H], if any."""
    dtype = wide(b.dtype)
    x = a.flatten(1).to(dtype) + dt_bias
    rate = -a_log.to(dtype).exp()
    beta = torch.sigmoid(b.flatten(1).to(dtype))
    dx = ddecay * rate * torch.sigmoid(x)
    db, da = into
    db.copy_((dbeta * beta * (1 - beta)).view(db.shape))
    da.copy_(dx.view(da.shape))
    for grad, terms in zip(grads, (ddecay * rate * F.softplus(x), dx), strict=True):
        if grad is not None:
            grad += terms.sum(0)
