"""The gated delta rule of delta nets: forward and backward.

S_t = exp(decay_t) S_{t-1};  S_t += k_t beta_t (v_t - S_t^T k_t)^T;  o_t = C^-0.5 S_t^T q_t

Suffixes: T tokens, K key heads of C columns, H value heads of V columns. Value head h reads key head h // (H / K).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.kernels import delta_gradients, delta_scan
from rptrain.kernels.batch import CHUNK, Documents
from rptrain.kernels.delta_tiles import Tiles, tiles
from rptrain.kernels.launch import fused, power_of_2, triton
from rptrain.kernels.reference import delta_rule as reference
from rptrain.kernels.target import target_of

BLOCK = 16  # rows of the diagonal blocks of a chunk's matrix that are inverted directly


class Kept(NamedTuple):
    """What backward needs of forward."""

    sums: Tensor  # [T, H], the running sums of decays in each chunk, float32
    inverses: Tensor  # [T, H, L], (I + A)^-1
    states: Tensor  # [T / L, H, V, C], before each chunk that is not a document's first


def has_kernels(*tensors: Tensor) -> bool:
    """Whether kernels compute the rule for such tensors: where matrix units multiply their type and float32."""
    return fused(*tensors) and target_of(tensors[0].device).tf32x3


def gated_delta_rule(
    q_TKC: Tensor,
    k_TKC: Tensor,
    v_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    documents: Documents,
    *,
    initial: Tensor | None = None,
    final: bool = False,
) -> tuple[Tensor, Tensor | None, Kept | None]:
    """The outputs [T, H, V] in the type of v, if `final` the states [documents, H, C, V] behind each document, and what
    backward needs.

    `decay` (logarithms, at most 0), `beta` and states are float32 (float64 for float64). A document's state begins
    with zeros, or with `initial`. Operands are contiguous.
    """
    if has_kernels(q_TKC, k_TKC, v_THV):
        return forward_triton(q_TKC, k_TKC, v_THV, decay_TH, beta_TH, documents, initial, final=final)
    out, states = reference.gated_delta_rule(q_TKC, k_TKC, v_THV, decay_TH, beta_TH, documents, initial)
    return out.to(v_THV.dtype), states if final else None, None


def gated_delta_rule_backward(
    dout_THV: Tensor,
    q_TKC: Tensor,
    k_TKC: Tensor,
    v_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    kept: Kept | None,
    documents: Documents,
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, in their types, and of decay and beta, in float32. Forward had no initial states."""
    if kept is not None:
        return backward_triton(dout_THV, q_TKC, k_TKC, v_THV, decay_TH, beta_TH, kept, documents)
    return reference.gated_delta_rule_backward(dout_THV, q_TKC, k_TKC, v_THV, decay_TH, beta_TH, documents)


def kept_bytes(tokens: int, heads: int, size: int, columns: int, itemsize: int) -> int:
    """Bytes that kernels keep for backward: `Kept`. The reference keeps nothing."""
    states = -(-tokens // CHUNK) * size * columns
    return heads * (tokens * (4 + CHUNK * itemsize) + states * itemsize)


def workspace_bytes(key_heads: int, heads: int, size: int, columns: int, itemsize: int) -> int:
    """Upper bound of the bytes per token that kernels need in backward, including the gradients that they write.

    For a multiple of CHUNK tokens.
    """
    values = heads * columns
    gradients = 2 * key_heads * size + values
    states = -(-size * columns // CHUNK)
    inside = 2 * values + heads * (states + 2 * CHUNK)  # values that are written, states, interactions
    statistics = heads * (3 + 2 * max(2, power_of_2(size) // 32))  # of decay and beta, also by columns of keys
    return itemsize * (gradients + inside) + 4 * statistics


def forward_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Documents,
    initial: Tensor | None,
    *,
    final: bool,
) -> tuple[Tensor, Tensor | None, Kept]:
    """`gated_delta_rule` by kernels."""
    tokens, heads, columns = v.shape
    size, count = q.shape[2], len(documents.first) - 1
    tile = tiles(q.dtype, target_of(q.device))
    interactions = torch.empty(tokens, heads, CHUNK, dtype=torch.float32, device=q.device)
    scores, sums = _prepared(q, k, decay, beta, documents, tile, interactions)
    inverses = torch.empty_like(scores)
    delta_scan.invert[len(documents.starts), heads](
        interactions, inverses, documents.starts, documents.ends, H=heads, L=CHUNK, B=BLOCK, num_warps=2
    )
    del interactions
    out = torch.empty_like(v)
    states = torch.empty(-(-tokens // CHUNK), heads, columns, size, dtype=q.dtype, device=q.device)
    last = q.new_empty(count, heads, size, columns, dtype=torch.float32) if final else None
    delta_scan.scan[heads * triton.cdiv(columns, tile.scan.values), count](
        q, k, v, inverses, scores, sums, beta, out, states, initial, last, documents.cu_seqlens, size**-0.5,
        HAS_INITIAL=initial is not None, HAS_LAST=final, STAGES=tile.scan.stages,
        **_constants(q, v, tile), **tile.scan.options,
    )  # fmt: skip
    return out, last, Kept(sums, inverses, states)


def backward_triton(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, kept: Kept, documents: Documents
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`gated_delta_rule_backward` by kernels."""
    (tokens, heads, columns), chunks, scale = v.shape, len(documents.starts), q.shape[2] ** -0.5
    tile = tiles(q.dtype, target_of(q.device))
    constants = _constants(q, v, tile)
    scores, _ = _prepared(q, k, decay, beta, documents, tile, None)
    dwanted, dstates = torch.empty_like(v), torch.empty_like(kept.states)
    delta_scan.scan_backward[heads * triton.cdiv(columns, tile.scan.values), len(documents.first) - 1](
        dout, q, k, kept.inverses, scores, kept.sums, beta, dwanted, dstates, documents.cu_seqlens, scale,
        STAGES=tile.scan.stages, **constants, **tile.scan.options,
    )  # fmt: skip
    written, dv = torch.empty_like(v), torch.empty_like(v)
    dscores, dinteractions = scores, torch.empty_like(scores)  # scores are not needed any more
    ddecay, dbeta = torch.empty_like(decay), torch.empty_like(beta)
    places = documents.starts, documents.ends, documents.document, documents.cu_seqlens
    delta_gradients.pair_gradients[chunks, heads](
        dout, k, v, kept.inverses, kept.sums, beta, kept.states, dwanted,
        written, dscores, dinteractions, dv, dbeta, *places, scale, **constants, **tile.pairs.options,
    )  # fmt: skip
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    block = min(tile.columns, constants["CB"])
    parts = constants["CB"] // block
    dsums, dbetas = (decay.new_empty(parts, *decay.shape) for _ in range(2))
    delta_gradients.query_gradients[chunks, q.shape[1] * parts](
        dout, q, k, kept.sums, kept.states, dscores, dq, dsums, *places, scale, tokens,
        BC=block, **constants, **tile.queries.options,
    )  # fmt: skip
    delta_gradients.key_gradients[chunks, q.shape[1] * parts](
        q, k, kept.sums, beta, kept.states, dwanted, dstates, written, dscores, dinteractions, dk, dsums, dbetas,
        *places, tokens, BC=block, **constants, **tile.keys.options,
    )  # fmt: skip
    delta_gradients.decay_gradients[chunks, triton.cdiv(heads, 16)](
        dsums, dbetas, ddecay, dbeta, documents.starts, documents.ends, tokens,
        PARTS=parts, H=heads, L=CHUNK, HB=16, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv, ddecay, dbeta


def _prepared(
    q: Tensor, k: Tensor, decay: Tensor, beta: Tensor, documents: Documents, tile: Tiles, interactions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """P [T, H, L], in the type of q, and the running sums of decays; writes A to `interactions`, if given."""
    tokens, heads = decay.shape
    scores = torch.empty(tokens, heads, CHUNK, dtype=q.dtype, device=q.device)
    sums = torch.empty_like(decay)
    delta_scan.prepare[len(documents.starts), q.shape[1]](
        q, k, decay, beta, documents.starts, documents.ends, interactions, scores, sums, q.shape[2] ** -0.5,
        HAS_INTERACTIONS=interactions is not None, K=q.shape[1], H=heads, C=q.shape[2], L=CHUNK,
        BC=tile.prepared, PRECISION=tile.scan.precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    return scores, sums


def _constants(q: Tensor, v: Tensor, tile: Tiles) -> dict[str, Any]:
    _, keys, size = q.shape
    block = max(tile.least, power_of_2(size))
    return {
        "K": keys, "H": v.shape[1], "C": size, "V": v.shape[2], "CB": block, "L": CHUNK,
    }  # fmt: skip
