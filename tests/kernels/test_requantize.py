"""Weights in 4 and 8 bits to FP8: the bits of dequantizing them to the model's type first."""

import pytest
import torch

from rptrain.kernels import fp8
from rptrain.kernels.fp8 import FP8, FP8Weight, Rows
from rptrain.kernels.quant import FORMATS, Quantized, dequantize, quantize
from rptrain.kernels.requantize import requantize, requantize_triton

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def weights(rows: int, size: int) -> torch.Tensor:
    """Rows of several magnitudes, an outlier, a row of zeros, and one of denormals."""
    w = torch.randn(rows, size, generator=torch.Generator().manual_seed(0))
    w *= torch.logspace(-3, 3, rows)[:, None]
    w[0, size // 2] = 1e4
    w[rows // 2] = 0
    w[-1] *= 1e-41
    return w


def expected(held: Quantized, shape: tuple[int, ...], dtype: torch.dtype) -> Rows:
    plain = dequantize(*held, torch.empty(shape, dtype=dtype))
    return fp8.quantize_rows(plain)


def same(found: Rows, wanted: Rows) -> bool:
    """Equal bits, NaN of either sign."""
    codes = [rows.codes.cpu().view(torch.uint8) for rows in (found, wanted)]
    nan = [code & 127 == 127 for code in codes]
    equal = torch.equal(*nan) and torch.equal(*(code.masked_fill(nan[0], 0) for code in codes))
    return equal and torch.equal(found.scales.cpu(), wanted.scales.cpu())


@pytest.mark.sample(8)
@formats
@dtypes
@pytest.mark.parametrize("shape", [(3, 256), (5, 77), (4, 16), (7, 130)])
def test_bits_of_dequantizing_first(fmt, dtype, shape, device, monkeypatch) -> None:
    monkeypatch.setattr(fp8, "row_block", lambda size: {"BLOCK": 64, "num_warps": 1})  # several blocks for a row
    held = Quantized(*quantize(weights(*shape), fmt), fmt)
    found = fp8.empty(*shape, torch.device(device))
    there = Quantized(held.codes.to(device), held.scales.to(device), fmt)
    requantize_triton(there, found, dtype)
    assert same(found, expected(held, shape, dtype))


@formats
def test_scales_that_are_not_finite(fmt, device) -> None:
    w = weights(4, 256)
    w[1, 100], w[2, 3] = float("inf"), float("nan")
    held = Quantized(*quantize(w, fmt), fmt)
    found = fp8.empty(4, 256, torch.device(device))
    requantize_triton(Quantized(held.codes.to(device), held.scales.to(device), fmt), found, torch.bfloat16)
    assert same(found, expected(held, (4, 256), torch.bfloat16))
    assert found.codes.float().isnan().any(1).tolist() == [False, True, True, False]


@formats
@pytest.mark.parametrize("shape", [(64, 4112), (320, 1008), (16, 16)])
def test_on_the_host_some_rows_at_a_time(fmt, shape, monkeypatch) -> None:
    """Also where rows do not end with a block, and as the weights of experts, with transposed codes."""
    monkeypatch.setattr("rptrain.kernels.requantize.CHUNK", 8192)
    held = Quantized(*quantize(weights(*shape), fmt), fmt)
    experts = (shape[0] // 16, 16, shape[1])
    weight = FP8Weight(
        Rows(torch.zeros(experts, dtype=torch.uint8).view(FP8), torch.zeros(experts[:2])),
        torch.zeros(experts[0], experts[2], experts[1], dtype=torch.uint8).view(FP8),
    )
    requantize(held, weight, torch.bfloat16)
    codes, scales = weight.rows
    assert same(Rows(codes.view(shape), scales.view(-1)), expected(held, shape, torch.bfloat16))
    assert weight.columns is not None and torch.equal(weight.columns.view(torch.uint8), codes.view(torch.uint8).mT)
