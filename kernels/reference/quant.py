"""Widening 4- and 8-bit weights in plain PyTorch: the oracle of kernels/quant.py, and what runs without CUDA."""

from functools import cache

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


# Scales in 8 bits, as bitsandbytes has them (QLoRA, section 3, "double quantization"). 256 of them are a record: their
# codes, the size of the largest and what was taken off all of them, both float32.
GROUP, RECORD = 256, 256 + 4 + 4


@cache
def dynamic_code() -> Tensor:
    """float32 of each code of a scale, ascending (Dettmers 2015, arXiv 1511.04561): 0, 1, and, of either sign and in
    each of seven decades, the middles of 1, 2, ..., 64 equal parts."""
    values = [0.0, 1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2**decade + 1)
        middles = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values))


def record_bounds(records: Tensor) -> Tensor:
    """float32 [records, 2]: of each the size of its largest, and what was taken off."""
    return records.view(-1, RECORD)[:, GROUP:].contiguous().view(torch.float32)


def nf4_double_values(codes: Tensor, records: Tensor) -> Tensor:
    """float32 [blocks, 64] of codes [blocks / 256, 32 * 256] and as many records."""
    largest, offset = record_bounds(records).split(1, 1)
    table = dynamic_code().to(records.device)
    scales = table[records.view(-1, RECORD)[:, :GROUP].int()] * largest + offset
    return nf4_values(codes.view(scales.numel(), -1), scales.flatten())
