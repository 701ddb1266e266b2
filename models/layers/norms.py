"""The norms before and after the parts of a block, forward and backward."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rptrain.kernels import fp8
from rptrain.kernels.fp8 import Form, Operand
from rptrain.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_operand


class NormSaved(NamedTuple):
    """The input of a norm."""

    x: Tensor  # [T, D]
    rstd: Tensor | None  # [T]; None: without a norm


@dataclass(frozen=True)
class Norms:
    """RMS norms of the inputs of a block's parts, and of their outputs before these are added."""

    eps: float
    pre: bool = True
    post: bool = False
    zero_centered: bool = False  # their factors are 1 + weight

    def before(
        self, weight: Tensor | None, x: Tensor, residual: Tensor | None, form: Form
    ) -> tuple[NormSaved, Operand]:
        """x plus the residual, if any; its norm, or with no norms before parts itself, in `form`."""
        if weight is not None:
            total, normed, rstd = rms_norm_operand(
                x, residual, weight, self.eps, form, zero_centered=self.zero_centered
            )
            return NormSaved(total, rstd), normed
        total = x if residual is None else x + residual
        return NormSaved(total, None), fp8.operand(total, form)

    def before_backward(
        self, weight: Tensor | None, grad: Tensor | None, dnormed: Tensor, saved: NormSaved, dresidual: Tensor
    ) -> Tensor:
        """The gradient of the sum, `dresidual` included; may be written over `dnormed`."""
        if weight is None or saved.rstd is None:
            return dnormed.add_(dresidual)
        norm = saved.x, weight, saved.rstd, grad, dresidual
        return rms_norm_backward(dnormed, *norm, zero_centered=self.zero_centered)

    def after(self, weight: Tensor | None, x: Tensor) -> tuple[Tensor, NormSaved | None]:
        """The norm of an output; itself with no norms after parts."""
        if weight is None:
            return x, None
        y, rstd = rms_norm(x, weight, self.eps, zero_centered=self.zero_centered)
        return y, NormSaved(x, rstd)

    def after_backward(self, weight: Tensor | None, grad: Tensor | None, dy: Tensor, saved: NormSaved | None) -> Tensor:
        """The gradient of an output; `dy` itself with no norms after parts."""
        if weight is None or saved is None or saved.rstd is None:
            return dy
        return rms_norm_backward(dy, saved.x, weight, saved.rstd, grad, zero_centered=self.zero_centered)
