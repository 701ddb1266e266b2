"""Causal attention over isolated documents: which implementation runs, and its backward.

- reference: any device and dtype; scores of a few hundred queries at a time are stored.
- flash: FlashAttention-2, 16-bit types on CUDA. Its backward adds into dq in an order that is fixed only
  under `torch.use_deterministic_algorithms(True)` (with warn_only it is not); that costs it a float32 copy
  of dq for every ceil(multiprocessors / (documents * heads)) of them.
- cudnn: the fastest on recent cards where documents are whole rows. Up to torch 2.13 the framework does not
  hand cuDNN's deterministic option on, so its backward never is: not taken while determinism is asked for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import reference
from rptrain.models.spec import MicroBatch

aten = torch.ops.aten


class Saved(NamedTuple):
    """What the backward needs beside q, k, v and out; without dropout, seed and offset are only handed on."""

    backend: str
    lse: Tensor  # float32 (float64 for float64); reference [T, H], flash [H, T], cudnn by row
    seed: Tensor | None = None
    offset: Tensor | None = None


def backend(
    dtype: torch.dtype,
    device_type: str,
    uniform: bool,
    head_size: int,
    *,
    deterministic: bool = True,
    force: str | None = None,
) -> str:
    """What runs for such inputs: "reference", "flash" or "cudnn"; ValueError if `force` cannot."""
    flash = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    flash = flash and head_size % 8 == 0 and head_size <= 256
    cudnn = flash and uniform and head_size <= 128
    runs = {"reference": True, "flash": flash, "cudnn": cudnn}
    if force is not None:
        if not runs.get(force, False):
            raise ValueError(
                f"attention backend {force!r} does not take {dtype} on {device_type}, head size {head_size}"
                f"{'' if uniform else ', documents inside rows'}"
            )
        return force
    if cudnn and not deterministic:
        return "cudnn"
    return "flash" if flash else "reference"


def attention(
    q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, mb: MicroBatch, force: str | None = None
) -> tuple[Tensor, Saved]:
    """out [T, H, C] and what the backward needs. Each token sees its own document up to itself."""
    chosen = backend(
        q_THC.dtype,
        q_THC.device.type,
        mb.uniform,
        q_THC.shape[-1],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        force=force,
    )
    if chosen == "flash":
        out, lse, seed, offset, _ = aten._flash_attention_forward(q_THC, k_TKC, v_TKC, *_limits(mb), 0.0, True, False)
        return out, Saved(chosen, lse, seed, offset)
    if chosen == "cudnn":
        q, k, v = (_by_row(x, mb) for x in (q_THC, k_TKC, v_TKC))
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False
        )
        return _by_token(out), Saved(chosen, lse, seed, offset)
    out, lse = reference.attention(q_THC, k_TKC, v_TKC, mb.positions, mb.rows, mb.length)
    return out, Saved(chosen, lse)


def attention_backward(
    dout: Tensor, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, out: Tensor, saved: Saved, mb: MicroBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, by the implementation that ran forward."""
    if saved.backend == "flash":
        return aten._flash_attention_backward(
            dout, q_THC, k_TKC, v_TKC, out, saved.lse, *_limits(mb), 0.0, True, saved.seed, saved.offset
        )
    if saved.backend == "cudnn":
        do, q, k, v, o = (_by_row(x, mb) for x in (dout, q_THC, k_TKC, v_TKC, out))
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
            mb.length,
            mb.length,
            0.0,
            True,
        )
        dq, dk, dv = (_by_token(grad) for grad in grads)
        return dq, dk, dv
    return reference.attention_backward(dout, q_THC, k_TKC, v_TKC, out, saved.lse, mb.positions, mb.rows, mb.length)


def _limits(mb: MicroBatch) -> tuple[Tensor, Tensor, int, int]:
    """Where the documents of queries and of keys start, and bounds of their lengths.

    At a bound of 1 the operation swaps queries for heads and lays the log-sum-exp out in another way.
    """
    bound = max(mb.max_seqlen, 2)
    return mb.cu_seqlens, mb.cu_seqlens, bound, bound


def _by_row(x_THC: Tensor, mb: MicroBatch) -> Tensor:
    """[R, H, L, C], a view."""
    return x_THC.unflatten(0, (mb.rows, mb.length)).transpose(1, 2)


def _by_token(x_RHLC: Tensor) -> Tensor:
    return x_RHLC.transpose(1, 2).flatten(0, 1)
