"""FP8 (e4m3) by rows in plain PyTorch: the reference of kernels/fp8.py, and what runs without CUDA."""

import torch
from torch import Tensor

NAN = 127  # the code
LARGEST = 448.0  # finite value
LEAST = 2.0**-126  # scale


def scales_of(largest: Tensor) -> Tensor:
    """The scale of each row from its largest magnitude, float32, which becomes the code 448.

    Rows that are not finite have the scale 1. No scale is below 2 ** -126, so that its inverse is finite.
    """
    scales = largest / torch.full_like(largest, LARGEST)  # on GPUs, torch multiplies by the inverse of a number
    return scales.clamp_(min=LEAST).masked_fill_(~largest.isfinite(), 1.0)


def quantize(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scales [N] of the rows of x [N, K], whose columns are multiplied by `factors` [K] first."""
    values = x.float() if factors is None else x.float() * factors
    scales = scales_of(values.abs().amax(1) if values.numel() else values.new_zeros(len(values)))
    return encode(values * (torch.ones_like(scales) / scales)[:, None]), scales


def encode(values: Tensor) -> Tensor:
    """The nearest codes, ties to even, of float32 values; NaN and infinities become NaN.

    Magnitudes above 448 become 448.
    """
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    codes.masked_fill_(values > LARGEST, 126).masked_fill_(values < -LARGEST, 254)  # in torch 2.11 they are NaN
    return codes.masked_fill_(~values.isfinite(), NAN).view(torch.float8_e4m3fn)


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor | None) -> Tensor:
    """float32 [M, N] of the codes a [M, K] times the transposed codes b [N, K], with the scales of rows."""
    result = (a.float() @ b.float().t()) * scale_a[:, None]
    return result if scale_b is None else result * scale_b
