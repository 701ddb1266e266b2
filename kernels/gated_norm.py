"""Root-mean-square norm of heads with a gate: y = silu(z) * (weight * (x / rms(x))).

T tokens, K key heads, H = K r value heads of V columns. Values are rounded where Hugging Face's modelling code rounds
them: the normed value, its product with the weight, and the result. Gradients are rounded once.
"""

from torch import Tensor

from rptrain.kernels.reference import gated_norm as reference


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y [T, H V] of x [T, H, V], contiguous, and the gate z [T, K, r V], a view with last stride 1; weight [V].

    A token moves 3 H V elements. Backward needs only the inputs.
    """
    return reference.gated_norm(x, z, weight, eps)


def gated_norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, into: Tensor, grad_weight: Tensor | None
) -> Tensor:
    """dx [T, H, V]; writes dz to `into`, a view as z is, which may be z itself. dy is contiguous.

    Adds the weight's gradient to `grad_weight` [V], if any, in the wide type. A token moves 5 H V elements.
    """
    return reference.gated_norm_backward(dy, x, z, weight, eps, into, grad_weight)
