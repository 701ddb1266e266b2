"""Weights to FP8 on the host: the native code gives the reference's bits."""

import pytest
import torch

from rptrain.kernels.fp8 import FP8, Rows
from rptrain.kernels.fp8_host import quantize_rows_into
from rptrain.kernels.reference import fp8 as reference
from rptrain.utils import native
from tests.kernels.test_fp8 import hard, same

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(5, 3), (1, 1), (65, 130), (33, 64), (7, 4097), (4, 0), (0, 7)]


def quantized(w: torch.Tensor) -> Rows:
    out = Rows(torch.full(w.shape, 3, dtype=torch.uint8).view(FP8), torch.full((len(w),), 3.0))
    quantize_rows_into(w, out)
    return out


@pytest.mark.sample(7)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_all_magnitudes(rows, columns, dtype) -> None:
    assert native.library("rptrain.kernels._fp8"), "installed without a compiler"
    w = hard(rows, columns, dtype) if rows and columns else torch.empty(rows, columns, dtype=dtype)
    same(quantized(w), Rows(*reference.quantize(w, None)))


@pytest.mark.parametrize("largest", [448, 449, 1.75, 0, 2.0**-126, 1e-40, 1e38, float("inf"), float("nan")])
def test_all_bfloat16_values_next_to_a_largest_one(largest) -> None:
    """In rows of their own magnitude, and in one with the largest value; NaN has one code, whatever its sign."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bounded = every[every.abs() <= (largest if largest < 1e38 else 1e38)]
    for dtype in DTYPES:
        for values in (bounded, every if largest != largest else bounded):
            row = torch.cat((values, torch.tensor([largest, -largest]))).to(dtype)[None]
            same(quantized(row), Rows(*reference.quantize(row, None)))
            each = values.to(dtype)[:, None].contiguous()
            same(quantized(each), Rows(*reference.quantize(each, None)))


def test_floats_between_two_codes_of_all_exponents() -> None:
    """The middles of codes, and the next floats on both sides, under scales of many powers of two."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (codes[:-1] + codes[1:]) / 2
    values = torch.cat([middles, *(torch.nextafter(middles, torch.tensor(to)) for to in (0.0, 448.0))])
    values = torch.cat((values, -values, torch.tensor([448.0])))
    w = values * torch.exp2(torch.arange(-140.0, 119.0))[:, None]
    same(quantized(w), Rows(*reference.quantize(w, None)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_native_code(dtype, monkeypatch) -> None:
    w = hard(33, 64, dtype)
    expected = Rows(*reference.quantize(w, None))
    same(quantized(w), expected)
    monkeypatch.setattr(native, "library", lambda module: None)
    same(quantized(w), expected)
