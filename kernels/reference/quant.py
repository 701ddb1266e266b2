"""Dequantizing 4- and 8-bit weights in plain PyTorch: the reference of kernels/quant.py, and what runs without CUDA."""

import torch
from torch import Tensor

# QLoRA (arXiv 2305.14314), appendix E: quantiles of the normal distribution, 0 among them, scaled to [-1, 1].
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# OCP Microscaling Formats 1.0, table 3: sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nf4_values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [blocks, 64] of codes [blocks, 32], the earlier element in the high half, and scales [blocks]."""
    table = torch.tensor(NF4, device=codes.device)
    pairs = torch.stack((codes >> 4, codes & 15), -1)
    return table[pairs.flatten(-2).int()] * scales[:, None]


def mxfp4_values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [blocks, 32] of codes [blocks, 16], the earlier element in the low half, and exponents [blocks].

    A scale is 2 ** (exponent - 127); the exponent 255 stands for NaN.
    """
    table = torch.tensor(E2M1, device=codes.device)
    table = torch.cat((table, -table))
    both = torch.stack((table.repeat(16), table.repeat_interleave(16)), -1)  # the two elements of each byte
    factors = torch.exp2(scales.double() - 127).float().masked_fill(scales == 255, torch.nan)
    return both[codes.int()].flatten(-2) * factors[:, None]


def int8_values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [blocks, 128] of codes [blocks, 128] and scales [blocks]."""
    return codes.float() * scales[:, None]


def fp8_values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [rows, size] of codes [rows, size], the bytes of e4m3, and scales [rows]."""
    return codes.view(torch.float8_e4m3fn).float() * scales[:, None]
