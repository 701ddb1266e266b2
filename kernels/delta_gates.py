"""The decay and the write strength of a gated delta net: decay = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b).

T tokens, K key heads, H = K r value heads. b and a [T, K, r] are views of a product's output with last stride 1;
a_log and dt_bias [H] are float32 (the wide type).
"""

from torch import Tensor

from rptrain.kernels.reference import delta_gates as reference


def gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """decay and beta [T, H], contiguous, in float32 (float64 for float64); beta is rounded to the type of b.

    A token moves 2 H elements and 8 H bytes. Backward needs only the inputs.
    """
    return reference.gates(b, a, a_log, dt_bias)


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
    """Writes the gradients of b and a to `into`, views as they are, which may be b and a themselves.

    ddecay and dbeta [T, H] are float32 (the wide type) and contiguous. Adds the gradients of a_log and dt_bias to
    `grads` [H], if any. A token moves 4 H elements and 8 H bytes.
    """
    reference.gates_backward(ddecay, dbeta, b, a, a_log, dt_bias, into, grads)
