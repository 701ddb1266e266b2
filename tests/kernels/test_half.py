"""Products summed in float16 against float64, for any range of values."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rptrain.kernels import half
from tests.cases import grid
from tests.kernels.exact import random
from tests.kernels.interpreter import dot_in_half

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
RANGES = {
    "random": lambda x: x,
    "columns of 1e4": lambda x: x.index_fill_(1, torch.tensor([3, 70], device=x.device), 1e4),
    "rows of 1e4": lambda x: x * torch.where(torch.arange(len(x), device=x.device) % 5 == 0, 1e4, 1.0)[:, None],
    "values of 1e-6": lambda x: x * 1e-6,
    "values of 1e-15": lambda x: x * 1e-15,
    "values of 1e15": lambda x: x * 1e15,
    "zeros": torch.zeros_like,
}


def operand(rows: int, inner: int, dtype: torch.dtype, device: str, seed: int, kind: str) -> Tensor:
    return RANGES[kind](random((rows, inner), fp32, device, seed)).to(dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, before: float | None = None) -> Tensor:
    """In a buffer that is wider than the result."""
    out = torch.full((len(a), len(b) + 3), float("nan") if before is None else before, dtype=dtype, device=a.device)
    half.product(out[:, : len(b)], a, b, add=before is not None)
    assert out[:, len(b) :].isnan().all() or before is not None
    return out[:, : len(b)]


def check(ours: Tensor, a: Tensor, b: Tensor) -> None:
    """Each value within 2^-10 of the product of the lengths of its rows, and all of them within 2^-11 on the whole."""
    exact = a.double() @ b.double().T
    error = (ours.double() - exact).abs()
    unit = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)[None]
    assert (error <= 2**-10 * unit).all(), (error / unit).max()
    assert error.norm() <= 2**-11 * unit.norm(), error.norm() / unit.norm()


@pytest.mark.parametrize("kind", RANGES)
def test_ranges(kind, device) -> None:
    a, b = (operand(rows, 200, bf16, device, rows, kind) for rows in (40, 33))
    check(product(a, b, fp32), a, b)


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "dtype"),
    [(130, 129, 128, bf16), (1, 1, 1, fp16), grid(40, 200, 300, fp16), grid(200, 40, 384, bf16)],
)
def test_sizes(rows, columns, inner, dtype, device) -> None:
    a, b = operand(rows, inner, dtype, device, 0, "random"), operand(columns, inner, dtype, device, 1, "random")
    check(product(a, b, fp32), a, b)


def test_transposed_operands_and_a_sum(device) -> None:
    """As the gradient of a weight: dy^T x, added to what is there."""
    dy, x = operand(70, 40, bf16, device, 0, "random"), operand(70, 24, bf16, device, 1, "random")
    total = product(dy.t(), x.t(), fp32, before=3.0)
    check(total - 3, dy.t(), x.t())
    assert torch.equal(total, product(dy.t().contiguous(), x.t().contiguous(), fp32, before=3.0))


def test_results_are_rounded_once(device) -> None:
    a, b = operand(20, 64, bf16, device, 0, "random"), operand(30, 64, bf16, device, 1, "random")
    for dtype in (bf16, fp16):
        assert torch.equal(product(a, b, dtype), product(a, b, fp32).to(dtype))


def test_neither_operands_nor_sums_overflow(device) -> None:
    """The largest operands and sums there are, and more terms than float16 can add."""
    a = torch.full((16, 512), 1.99, dtype=bf16, device=device) * 2.0**40
    assert torch.allclose(product(a, a, fp32), (a.float() @ a.float().T), rtol=2**-10)
    ones = torch.ones(16, 4160, dtype=fp16, device=device)
    assert torch.equal(product(ones, ones, fp32), torch.full((16, 16), 4160.0, device=device))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_their_rows(value, device) -> None:
    a, b = operand(20, 80, bf16, device, 0, "random"), operand(18, 80, bf16, device, 1, "random")
    before = product(a, b, fp32)
    a[3, 5], b[7, 70] = value, value
    after = product(a, b, fp32)
    assert not after[3].isfinite().any() and not after[:, 7].isfinite().any()
    rest = torch.ones(20, 18, dtype=torch.bool, device=device)
    rest[3], rest[:, 7] = False, False
    assert torch.equal(after[rest], before[rest])


def test_heads_keep_their_bits(device) -> None:
    """Those not below 2^-17 of the largest of their row; strided tokens, a row of zeros."""
    x = random((9, 5, 24), bf16, device)[:, :3] * 1e30
    x[4, 1], x[5, 2] = 0, x[5, 2] * 1e-35
    values, scales, dtype = half.scaled_heads(x)
    assert dtype == bf16 and values.shape == x.shape and values.is_contiguous() and values.abs().max() < 2
    assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
    assert torch.equal((values.double() * scales.T[..., None].double()).to(bf16), x)


def test_the_interpreter_rounds_sums_after_each_few_terms() -> None:
    ones = np.ones((1, 4096), np.float16)
    small = np.full((4096, 1), 2.0**-4, np.float16)
    start = np.full((1, 1), 2048.0, np.float16)  # its unit is 2, and 8 terms are less than half of that
    assert dot_in_half(ones, small, start) == 2048
    assert dot_in_half(ones, small, np.zeros((1, 1), np.float16)) == 256
