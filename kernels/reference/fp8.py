"""FP8 (e4m3) by rows in plain PyTorch: the oracle of kernels/fp8.py, and what runs without CUDA."""

import torch
from torch import Tensor

ROUND_UP = 0x1FFFFF  # added to the bits of a float32, carries into the exponent where the mantissa is above 1.75
NAN = 127  # the code
LARGEST = 448.0  # finite value


def scales_of(largest: Tensor) -> Tensor:
    """The scale of each row from its largest magnitude, float32: the least power of two that keeps it within 448.

    Rows that are not finite have the scale 1. No scale is below 2 ** -126, so that its inverse is finite.
    """
    exponents = ((largest.view(torch.int32) + ROUND_UP) >> 23).sub_(8).clamp_(min=1)
    return (exponents.masked_fill_(~largest.isfinite(), 127) << 23).view(torch.float32)


def inverse(scales: Tensor) -> Tensor:
    """1 / scales, exactly."""
    return ((254 << 23) - scales.view(torch.int32)).view(torch.float32)


def quantize(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scales [N] of the rows of x [N, K], whose columns are multiplied by `factors` [K] first."""
    values = x.float() if factors is None else x.float() * factors
    scales = scales_of(values.abs().amax(1) if values.numel() else values.new_zeros(len(values)))
    return encode(values * inverse(scales)[:, None]), scales


def encode(values: Tensor) -> Tensor:
    """The nearest codes, ties to even, of float32 values; NaN and infinities become NaN.

    Magnitudes above 448, which only rows that are not finite have, become 448.
    """
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    codes.masked_fill_(values > LARGEST, 126).masked_fill_(values < -LARGEST, 254)  # in torch 2.11 they are NaN
    return codes.masked_fill_(~values.isfinite(), NAN).view(torch.float8_e4m3fn)


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor | None) -> Tensor:
    """float32 [M, N] of the codes a [M, K] times the transposed codes b [N, K], with the scales of rows."""
    result = (a.float() @ b.float().t()) * scale_a[:, None]
    return result if scale_b is None else result * scale_b
