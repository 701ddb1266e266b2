"""Causal convolution by channel, SiLU, and the L2 norm of the heads of queries and keys.

T tokens, K key heads of C columns, H = K r value heads of V columns, width W. Inputs are views of a product's output
with last stride 1: q and k [T, K, C], v [T, K, r V]. The weight [2 K C + H V, 1, W] has the channels of q, then of k,
then of v; its last tap is that of the token itself. Everything is float32 inside (float64 for float64) and rounded
once.
"""

from torch import Tensor

from rptrain.kernels.reference import causal_conv as reference


def causal_conv(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [T, K, C], each head divided by its length, and values [T, K, r V] = [T, H, V]; contiguous.

    `positions` [T] are those in the token's document: taps that reach before its start read zero. A token's inputs
    are read once and its outputs written once, 2 (2 K C + H V) elements. Backward needs only the inputs.
    """
    return reference.causal_conv(q, k, v, weight, positions)


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
    """Writes the gradients of the inputs q, k and v to `into`, views as they are, which share no memory with them.

    dq, dk and dv are contiguous; dv may be [T, H, V]. Adds the weight's gradient to `grad_weight` [channels, 1, W], if
    any, in the wide type. The forward pass is recomputed: 3 (2 K C + H V) elements per token.
    """
    reference.causal_conv_backward(dq, dk, dv, q, k, v, weight, positions, into, grad_weight)


def causal_conv_from(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, history: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`causal_conv` in decoding: documents go on after `history` [documents, channels, W - 1], their last inputs.

    `cu_seqlens` [documents + 1]: where the documents' new tokens start, and T. All in torch, without a wait.
    """
    return reference.causal_conv_from(q, k, v, weight, history, cu_seqlens)


def last_inputs(
    q: Tensor, k: Tensor, v: Tensor, width: int, cu_seqlens: Tensor, history: Tensor | None = None
) -> Tensor:
    """The last `width` - 1 inputs of each document, [documents, channels, width - 1]: the next `history`.

    Where a document has fewer tokens, those of `history` come before them, or zeros. q, k, v and `cu_seqlens` are
    those of `causal_conv_from`, or of a prompt.
    """
    return reference.last_inputs(q, k, v, width, cu_seqlens, history)
