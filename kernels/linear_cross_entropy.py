"""Output projection and cross-entropy over chunks of tokens, so that logits are never stored whole.

The logits are rounded to the model's dtype, as Hugging Face's models do, and the softmax is in float32
(float64 for float64). Nothing here waits for the device.
"""

import torch
from torch import Tensor

from rptrain.kernels.linear import accumulate_weight_grad, linear, linear_backward_input
from rptrain.kernels.reference import wide

IGNORED = -100
CHUNK_BYTES = 2**28  # of float32 logits


def chunk_tokens(vocab: int) -> int:
    """Tokens whose logits are computed at a time: a multiple of 128 where there is room for that many."""
    tokens = max(CHUNK_BYTES // (4 * vocab), 1)
    return tokens // 128 * 128 or tokens


def linear_cross_entropy(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> Tensor:
    """The sum over labels other than -100 of the cross-entropy: a scalar in the wide type."""
    chunk = chunk_tokens(w_VD.shape[0])
    losses = [
        _softmax(linear(h, w_VD), labels)[0] for h, labels in zip(h_TD.split(chunk), labels_T.split(chunk), strict=True)
    ]
    return torch.cat(losses).sum()


def linear_cross_entropy_backward(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, scale: float, grad_w_VD: Tensor
) -> tuple[Tensor, Tensor]:
    """The unscaled loss sum, and the gradient [T, D] of `scale` times it; adds the weight's to its own."""
    chunk = chunk_tokens(w_VD.shape[0])
    dh_TD = torch.empty_like(h_TD)
    losses = []
    chunks = zip(h_TD.split(chunk), labels_T.split(chunk), dh_TD.split(chunk), strict=True)
    for h, labels, dh in chunks:
        loss, dlogits = _softmax(linear(h, w_VD), labels, scale)
        losses.append(loss)
        dlogits = dlogits.to(h.dtype)
        dh.copy_(linear_backward_input(dlogits, w_VD))
        accumulate_weight_grad(grad_w_VD, dlogits, h)
    return torch.cat(losses).sum(), dh_TD


def _softmax(logits: Tensor, labels: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Losses by token and, given `scale`, the gradient of the logits, in one wide buffer (or in `logits`)."""
    logits = logits.to(wide(logits.dtype))
    supervised = labels != IGNORED
    place = labels.clamp(min=0).unsqueeze(1)
    target = logits.gather(1, place)
    top = logits.amax(1, keepdim=True)
    exps = logits.sub_(top).exp_()
    total = exps.sum(1, keepdim=True)
    losses = torch.where(supervised, (total.log() + top - target).squeeze(1), 0)
    if scale is not None:
        factor = supervised.to(exps.dtype).mul_(scale).unsqueeze(1)
        at_target = ((target - top).exp() / total - 1) * factor
        exps.mul_(factor / total).scatter_(1, place, at_target)
    return losses, exps
