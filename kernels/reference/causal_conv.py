"""Causal convolution by channel, SiLU, and the L2 norm of the heads of queries and keys, in plain PyTorch.

Suffixes and sizes are those of kernels/causal_conv.py. Everything is computed in the wide type and rounded once.
"""

import torch
from torch import Tensor

from rptrain.kernels.reference.dense import wide

EPS = 1e-6  # of the L2 norm


def causal_conv(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, contiguous."""
    parts = zip((q, k, v), _weights(q, k, v, weight), (True, True, False), strict=True)
    q, k, v = (_activate(_convolve(_taps(x, positions, w.shape[-1]), w), norm).to(x.dtype) for x, w, norm in parts)
    return q, k, v


def causal_conv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    positions: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    grad_weight: Tensor | None,
) -> None:
    """Writes the gradients of q, k and v to `into`, and adds the weight's to `grad_weight` in the wide type."""
    width = weight.shape[-1]
    grads_w = []
    parts = zip((q, k, v), (dq, dk, dv), _weights(q, k, v, weight), into, (True, True, False), strict=True)
    for x, dy, w, dx, norm in parts:
        taps = _taps(x, positions, width)
        dconv = _activate_backward(dy.reshape(x.shape).to(taps.dtype), _convolve(taps, w), norm)
        grads_w.append((dconv.unsqueeze(-1) * taps).sum(0).flatten(0, 1))
        total = torch.zeros_like(dconv)
        for tap in range(min(width, len(x))):  # what the tokens `tap` later received
            later = torch.where(positions[tap:, None, None] >= tap, dconv[tap:], 0)
            total[: len(x) - tap] += later * w[..., width - 1 - tap]
        dx.copy_(total)
    if grad_weight is not None:
        grad_weight += torch.cat(grads_w).view(grad_weight.shape)


def causal_conv_from(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, history: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`causal_conv` of documents that continue after `history` [documents, channels, W - 1]."""
    width = weight.shape[-1]
    x = torch.cat([part.flatten(1) for part in (q, k, v)], 1)
    document, offset = _places(len(x), cu_seqlens)
    back = torch.arange(1 - width, 1, device=x.device)
    reached = offset[:, None] + back  # of each tap, in the tokens of its document
    before = document[:, None] * (width - 1) + width - 1 + reached
    tokens = len(history) * (width - 1) + torch.arange(len(x), device=x.device)[:, None] + back
    rows = torch.cat((history.transpose(1, 2).flatten(0, 1).to(x.dtype), x))
    taps = rows[torch.where(reached >= 0, tokens, before)].transpose(1, 2).to(wide(x.dtype))
    split = taps.split([part.shape[1] * part.shape[2] for part in (q, k, v)], 1)
    parts = zip((q, k, v), split, _weights(q, k, v, weight), (True, True, False), strict=True)
    q, k, v = (_activate(_convolve(taps.reshape(*x.shape, width), w), norm).to(x.dtype) for x, taps, w, norm in parts)
    return q, k, v


def last_inputs(q: Tensor, k: Tensor, v: Tensor, width: int, cu_seqlens: Tensor, history: Tensor | None) -> Tensor:
    """The last `width` - 1 inputs of each document, [documents, channels, width - 1], after `history` or zeros."""
    x = torch.cat([part.flatten(1) for part in (q, k, v)], 1)
    documents, kept = len(cu_seqlens) - 1, width - 1
    if history is None:
        history = x.new_zeros(documents, x.shape[1], kept)
    back = torch.arange(-kept, 0, device=x.device)
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    reached = ends + back
    index = torch.arange(documents, device=x.device)[:, None] * kept
    before = index + kept + reached - starts
    rows = torch.cat((history.transpose(1, 2).flatten(0, 1).to(x.dtype), x))
    return rows[torch.where(reached >= starts, documents * kept + reached, before)].transpose(1, 2).contiguous()


def _places(tokens: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The document of each token, and the token's place among the document's tokens."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return document, token - cu_seqlens[document]


def _weights(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
    """The weights of q, k and v, [K, C or r V, W]."""
    width = weight.shape[-1]
    parts = weight.to(wide(q.dtype)).view(-1, width).split([x.shape[1] * x.shape[2] for x in (q, k, v)])
    return [part.view(*x.shape[1:], width) for part, x in zip(parts, (q, k, v), strict=True)]


def _taps(x: Tensor, positions: Tensor, width: int) -> Tensor:
    """The inputs of each token and of the `width` - 1 tokens before it, [*x.shape, W]; zero before a document."""
    taps = torch.zeros(*x.shape, width, dtype=wide(x.dtype), device=x.device)
    for tap in range(min(width, len(x))):
        taps[tap:, ..., width - 1 - tap] = torch.where(positions[tap:, None, None] >= tap, x[: len(x) - tap], 0)
    return taps


def _convolve(taps: Tensor, weight: Tensor) -> Tensor:
    return (taps * weight).sum(-1)


def _activate(conv: Tensor, norm: bool) -> Tensor:
    y = conv * torch.sigmoid(conv)
    return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + EPS) if norm else y


def _activate_backward(dy: Tensor, conv: Tensor, norm: bool) -> Tensor:
    sigmoid = torch.sigmoid(conv)
    if norm:
        y = conv * sigmoid
        inverse = torch.rsqrt(y.square().sum(-1, keepdim=True) + EPS)
        normed = y * inverse
        dy = (dy - normed * (dy * normed).sum(-1, keepdim=True)) * inverse
    return dy * sigmoid * (1 + conv * (1 - sigmoid))
