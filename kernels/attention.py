"""Causal attention over isolated documents: choice of the implementation, and its backward.

- reference: any device and dtype; scores of a few hundred queries at a time are stored.
- triton: our own kernels (kernels/flash.py), on CUDA for any dtype except float64. Deterministic, for any documents,
  windows and sinks, and without the workspace of flash. Training uses it.
- flash: the framework's FlashAttention-2, 16-bit types on CUDA. Its backward adds into dq in an order that is fixed
  only under `torch.use_deterministic_algorithms(True)` (with warn_only it is not); that costs it a float32 copy of dq
  for every ceil(multiprocessors / (documents * heads)) of them. It is used if Triton is missing.
- cudnn: very fast on recent cards if all documents have the same length. Up to torch 2.13, torch does not pass on
  cuDNN's deterministic option, so its backward is not used while determinism is required.
- hybrid: cuDNN's forward, which is deterministic, with the backward of triton; training uses it instead of triton for
  documents of equal length on cards with asynchronous matrix units (9.0, 10.0), where cuDNN is much
  faster.

For q, k and v as ScaledHeads triton takes the place of flash, cudnn and hybrid, and sums its products in float16
([decision 22](../docs/decisions/0022-half-precision-sums.md)).

A window w lets token i see the tokens i - w + 1 to i of its document. Sinks [H] are one learned score per head
that takes part in the softmax and has no value (GPT-OSS). Only triton and the reference support windows and sinks.
Scores are multiplied by `scale`, by default C ** -0.5.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import flash
from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.half import Heads, ScaledHeads
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.target import SMALL, Target, target_of

aten = torch.ops.aten


class Saved(NamedTuple):
    """The tensors that the backward needs besides q, k, v and out; without dropout, seed and offset are not used."""

    backend: str  # of the backward
    lse: Tensor  # float32 (float64 for float64); reference [T, H], triton and flash [H, T], cudnn by document
    seed: Tensor | None = None
    offset: Tensor | None = None


def backend(
    dtype: torch.dtype,
    device_type: str,
    uniform: bool,
    head_size: int,
    *,
    plain: bool = True,
    deterministic: bool = True,
    target: Target = SMALL,
    force: str | None = None,
) -> str:
    """The implementation for such inputs: "reference", "triton", "flash", "cudnn" or "hybrid".

    Raises ValueError if `force` does not support them. `uniform`: all documents have the same length.
    `plain`: neither window nor sinks. `target`: the GPU, on CUDA.
    """
    cuda = device_type == "cuda"
    framework = cuda and plain and dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0
    runs = {
        "reference": True,
        "triton": cuda and flash.takes(dtype, head_size),
        "flash": framework and head_size <= 256,
        "cudnn": framework and target.cudnn and uniform and head_size <= 128,
    }
    runs["hybrid"] = runs["cudnn"] and runs["triton"]
    if force is not None:
        if not runs.get(force, False):
            raise ValueError(
                f"attention backend {force!r} does not take {dtype} on {device_type}, head size {head_size}"
                f"{'' if uniform else ', documents of several lengths'}{'' if plain else ', a window or sinks'}"
            )
        return force
    if runs["cudnn"] and not deterministic:
        return "cudnn"
    if runs["hybrid"] and target.async_matrix_units:
        return "hybrid"
    return next(name for name in ("triton", "flash", "reference") if runs[name])


def attention(
    q_THC: Heads,
    k_TKC: Heads,
    v_TKC: Heads,
    mb: MicroBatch,
    force: str | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Saved]:
    """out [T, H, C] and the tensors for backward. Each token attends to its own document up to itself.

    `force` is the implementation for q, k and v as tensors.
    """
    if isinstance(q_THC, ScaledHeads):
        return _attention_triton(q_THC, k_TKC, v_TKC, mb, window, sinks, scale)
    assert isinstance(k_TKC, Tensor) and isinstance(v_TKC, Tensor)
    chosen = backend(
        q_THC.dtype,
        q_THC.device.type,
        mb.uniform and mb.max_seqlen > 1,  # cuDNN takes no single keys
        q_THC.shape[-1],
        plain=window is None and sinks is None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        target=SMALL if force else target_of(q_THC.device),
        force=force,
    )
    if chosen == "triton":
        return _attention_triton(q_THC, k_TKC, v_TKC, mb, window, sinks, scale)
    if chosen == "flash":
        inputs = q_THC, k_TKC, v_TKC, *_limits(mb)
        out, lse, seed, offset, _ = aten._flash_attention_forward(*inputs, 0.0, True, False, scale=scale)
        return out, Saved(chosen, lse, seed, offset)
    if chosen in ("cudnn", "hybrid"):
        q, k, v = (_by_document(x, mb) for x in (q_THC, k_TKC, v_TKC))
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=scale
        )
        if chosen == "cudnn":
            return _by_token(out), Saved(chosen, lse, seed, offset)
        return _by_token(out), Saved("triton", lse.squeeze(-1).transpose(0, 1).flatten(1).contiguous())
    layout = mb.positions, mb.sequences, mb.length
    out, lse = reference.attention(q_THC, k_TKC, v_TKC, *layout, window, sinks, scale=scale)
    return out, Saved(chosen, lse)


def _attention_triton(
    q: Heads, k: Heads, v: Heads, mb: MicroBatch, window: int | None, sinks: Tensor | None, scale: float | None
) -> tuple[Tensor, Saved]:
    out, lse = flash.forward_triton(q, k, v, mb.positions, mb.length, window, sinks, scale=scale)
    return out, Saved("triton", lse)


def attention_backward(
    dout: Tensor,
    q_THC: Heads,
    k_TKC: Heads,
    v_TKC: Heads,
    out: Tensor,
    saved: Saved,
    mb: MicroBatch,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    grad_sinks: Tensor | None = None,
    scale: float | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, by the implementation of the forward pass, with the same window, sinks and scale.

    They are new tensors, or `into`: views of a wider one, such as the gradient of the fused product, whose tokens
    hold their heads side by side. The gradient of the sinks is added to `grad_sinks` [H] in the wide type.
    """
    extras = window, sinks, grad_sinks
    if saved.backend == "triton":
        layout = mb.positions, mb.cu_seqlens, mb.length
        return flash.backward_triton(dout, q_THC, k_TKC, v_TKC, out, saved.lse, *layout, *extras, into, scale=scale)
    assert isinstance(q_THC, Tensor) and isinstance(k_TKC, Tensor) and isinstance(v_TKC, Tensor)
    inputs = dout, q_THC, k_TKC, v_TKC, out, saved.lse
    if saved.backend == "flash":
        grads = aten._flash_attention_backward(*inputs, *_limits(mb), 0.0, True, saved.seed, saved.offset, scale=scale)
    elif saved.backend == "cudnn":
        do, q, k, v, o = (_by_document(x, mb) for x in (dout, q_THC, k_TKC, v_TKC, out))
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            do,
            q,
            k,
            v,
            o,
            saved.lse,
            saved.seed,
            saved.offset,
            None,
            None,
            None,
            mb.max_seqlen,
            mb.max_seqlen,
            0.0,
            True,
            scale=scale,
        )
        dq, dk, dv = (_by_token(grad) for grad in grads)
        grads = dq, dk, dv
    else:
        grads = reference.attention_backward(*inputs, mb.positions, mb.sequences, mb.length, *extras, scale=scale)
    if into is None:
        return grads
    for place, grad in zip(into, grads, strict=True):
        place.copy_(grad)
    return into


def _limits(mb: MicroBatch) -> tuple[Tensor, Tensor, int, int]:
    """Where the documents of queries and of keys start, and bounds of their lengths.

    At a bound of 1 the operation swaps queries for heads and lays the log-sum-exp out in another way.
    """
    bound = max(mb.max_seqlen, 2)
    return mb.cu_seqlens, mb.cu_seqlens, bound, bound


def _by_document(x_THC: Tensor, mb: MicroBatch) -> Tensor:
    """[N, H, L, C], a view, of N documents of L tokens."""
    return x_THC.unflatten(0, (-1, mb.max_seqlen)).transpose(1, 2)


def _by_token(x_NHLC: Tensor) -> Tensor:
    return x_NHLC.transpose(1, 2).flatten(0, 1)
