"""The gated delta rule of delta nets: forward and backward.

S_t = exp(decay_t) S_{t-1};  S_t += k_t beta_t (v_t - S_t^T k_t)^T;  o_t = C^-0.5 S_t^T q_t

Suffixes: T tokens, K key heads of C columns, H value heads of V columns. Value head h reads key head h // (H / K).
"""

from typing import Any

from torch import Tensor

from rptrain.kernels.batch import Documents
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
) -> tuple[Tensor, Tensor, Any]:
    """The outputs [T, H, V] in the type of v, the states [documents, H, C, V] behind each document in float32 (float64
    for float64), and what backward needs.

    `decay` (logarithms, at most 0) and `beta` are float32. A document's state begins with zeros, or with `initial`.
    """
    out, states = reference.gated_delta_rule(q_TKC, k_TKC, v_THV, decay_TH, beta_TH, documents, initial)
    return out.to(v_THV.dtype), states, None


def gated_delta_rule_backward(
    dout_THV: Tensor,
    q_TKC: Tensor,
    k_TKC: Tensor,
    v_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    saved: Any,
    documents: Documents,
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, in their types, and of decay and beta, in float32; without initial states."""
    return reference.gated_delta_rule_backward(dout_THV, q_TKC, k_TKC, v_THV, decay_TH, beta_TH, documents)
