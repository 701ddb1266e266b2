"""Grouped products in FP8 in plain PyTorch: the reference of kernels/grouped_fp8.py, and what runs without CUDA.

Suffixes as in kernels/reference/moe.py; P is the length of the segments, one for each expert that has rows.
"""

import torch
from torch import Tensor

from rptrain.kernels.reference import fp8
from rptrain.kernels.reference.moe import groups


def quantize_rows(x_NK: Tensor, factors_EK: Tensor | None, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scales [N] of rows whose columns are multiplied by the factors of the row's expert first.

    Experts are taken one by one without factors too: the values are upcast.
    """
    codes = x_NK.new_empty(x_NK.shape, dtype=torch.float8_e4m3fn)
    scales = x_NK.new_empty(len(x_NK), dtype=torch.float32)
    for expert, rows in groups(ends_E):
        codes[rows], scales[rows] = fp8.quantize(x_NK[rows], None if factors_EK is None else factors_EK[expert])
    return codes, scales


def quantize_columns(
    x_NM: Tensor, factors_N: Tensor, ends_E: Tensor, length: int, segment: int
) -> tuple[Tensor, Tensor]:
    """Codes [M, P] and scales [E, M] of each expert's columns, whose rows are multiplied by the factors first."""
    codes = x_NM.new_zeros(x_NM.shape[1], length, dtype=torch.uint8)
    scales = x_NM.new_zeros(len(ends_E), x_NM.shape[1], dtype=torch.float32)
    for expert, rows, at in _segments(ends_E, segment):
        found, scales[expert] = fp8.quantize(x_NM[rows].t(), factors_N[rows])
        codes[:, at : at + found.shape[1]] = found.view(torch.uint8)
    return codes.view(torch.float8_e4m3fn), scales


def transpose(codes_NK: Tensor, ends_E: Tensor, length: int, segment: int) -> Tensor:
    """The codes of each expert's rows as columns: [K, P]."""
    codes = codes_NK.view(torch.uint8)
    out = codes.new_zeros(codes.shape[1], length)
    for _, rows, at in _segments(ends_E, segment):
        found = codes[rows].t()
        out[:, at : at + found.shape[1]] = found
    return out.view(torch.float8_e4m3fn)


def product(
    a_NK: Tensor,
    scales_N: Tensor,
    b_EMK: Tensor,
    scales_EM: Tensor | None,
    ends_E: Tensor,
    bias_EM: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Rows of expert e times the transposed b_EMK[e], plus bias_EM[e], rounded once: [N, M]."""
    out = scales_N.new_empty(len(a_NK), b_EMK.shape[1], dtype=dtype)
    for expert, rows in groups(ends_E):
        by_output = None if scales_EM is None else scales_EM[expert]
        result = fp8.product(a_NK[rows], b_EMK[expert], scales_N[rows], by_output)
        out[rows] = result if bias_EM is None else result.add_(bias_EM[expert])
    return out


def accumulate(acc_EMK: Tensor, a_MP: Tensor, scales_EM: Tensor, b_KP: Tensor, ends_E: Tensor, segment: int) -> None:
    """acc_EMK[e] += the product of the columns of both segments, times the scales of the rows of A."""
    for expert, rows, at in _segments(ends_E, segment):
        part = slice(at, at + rows.stop - rows.start)
        acc_EMK[expert] += fp8.product(a_MP[:, part], b_KP[:, part], scales_EM[expert], None)


def _segments(ends_E: Tensor, segment: int) -> list[tuple[int, slice, int]]:
    """Experts that have rows, which, and where their segments begin."""
    found, at = [], 0
    for expert, rows in groups(ends_E):
        found.append((expert, rows, at))
        at += -(-(rows.stop - rows.start) // segment) * segment
    return found
