"""The gated delta rule of delta nets: forward and backward.

S_t = exp(decay_t) S_{t-1};  S_t += k_t beta_t (v_t - S_t^T k_t)^T;  o_t = C^-0.5 S_t^T q_t

Suffixes: T tokens, K key heads of C columns, H value heads of V columns. Value head h reads key head h // (H / K).
"""

from torch import Tensor

from rptrain.kernels import delta_scan
from rptrain.kernels.batch import CHUNK, Documents
from rptrain.kernels.delta_scan import Kept
from rptrain.kernels.launch import fused, power_of_2
from rptrain.kernels.reference import delta_rule as reference


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
    if fused(q_TKC, k_TKC, v_THV):
        return delta_scan.forward(q_TKC, k_TKC, v_THV, decay_TH, beta_TH, documents, initial, final=final)
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
        return delta_scan.backward(dout_THV, q_TKC, k_TKC, v_THV, decay_TH, beta_TH, kept, documents)
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
    inside = 2 * values + heads * (size * columns // CHUNK + 2 * CHUNK)  # values that are written, states, interactions
    statistics = heads * (3 + 2 * max(2, power_of_2(size) // 32))  # of decay and beta, also by columns of keys
    return itemsize * (gradients + inside) + 4 * statistics
