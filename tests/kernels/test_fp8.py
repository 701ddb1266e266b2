"""FP8 by rows: codes exactly, and products within rounding of their result in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rptrain.kernels import cublaslt, fp8, fp8_products
from rptrain.kernels.fp8 import FP8, Rows
from rptrain.kernels.linear import accumulate_weight_grad, linear, linear_backward, linear_backward_input
from rptrain.kernels.reference import fp8 as reference
from rptrain.kernels.target import nvidia
from tests.kernels.exact import random
from tests.kernels.interpreter import E4M3, to_e4m3

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
sizes = pytest.mark.parametrize(("rows", "columns"), [(5, 3), (1, 1), (65, 130), (33, 64)])


def hard(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Values of many magnitudes: outliers, a row and a column of zeros, and a row of denormals."""
    x = random((rows, columns), torch.float32, "cpu") * torch.exp2(torch.arange(rows) % 40 - 20)[:, None]
    x[0, 0] = 1e30
    if rows > 4:
        x[1], x[2], x[3] = 0, x[2] * 1e-44, -448
    if columns > 2:
        x[:, 1] = 0
    return x.to(device, dtype)


def factors_of(count: int, device: str, seed: int = 0) -> Tensor:
    """Factors of many magnitudes, as scales are."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 9, (count,), generator=generator)
    return (torch.exp2(exponents.float()) * (1 + torch.rand(count, generator=generator))).to(device)


def same(ours: Rows, theirs: Rows) -> None:
    assert torch.equal(ours.scales.cpu(), theirs.scales.cpu())
    assert torch.equal(ours.codes.view(torch.uint8).cpu(), theirs.codes.view(torch.uint8).cpu())


def test_each_code_is_the_nearest() -> None:
    """Of all bfloat16 values within the range, and of those in the middle of two codes."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[x.abs() <= 448]
    middles = torch.from_numpy((E4M3[:126] + E4M3[1:127]) / 2)
    x = torch.cat((x, middles, -middles, torch.nextafter(middles, torch.tensor(0.0))))
    codes = reference.encode(x).view(torch.uint8)
    assert np.array_equal(codes.numpy(), to_e4m3(x.numpy()))
    distances = (x[:, None].double() - torch.from_numpy(E4M3[:127]).double()).abs().amin(1)
    errors = (codes.view(FP8).float().double() - x.double()).abs()
    assert torch.equal(errors[x >= 0], distances[x >= 0])
    assert reference.encode(torch.tensor([464.1, -1e38])).view(torch.uint8).tolist() == [126, 254]
    not_finite = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan])
    assert reference.encode(not_finite).view(torch.uint8).tolist() == [127] * 4


def test_the_largest_value_of_a_row_is_exact() -> None:
    largest = torch.tensor([448.0, 448.1, 1.75, 1.0, 1e-30, 3e38, 0.0, 1e-45, torch.inf, torch.nan])
    scales = reference.scales_of(largest)
    assert scales.tolist()[6:] == [2**-126, 2**-126, 1, 1] and torch.equal(scales[:6], largest[:6] / largest[0])
    for _ in range(50):
        row = random((1, 40), torch.float32, "cpu") * 10.0 ** torch.randint(-20, 20, ())
        rows = fp8.quantize_rows(row)
        place = row.abs().argmax()
        assert rows.codes.float()[0, place].abs() == 448
        assert (1 / rows.scales).isfinite().all() and rows.dequantize(torch.float32)[0, place] == pytest.approx(
            row[0, place].item(), rel=1e-6
        )


@pytest.mark.sample(6)
@dtypes
@sizes
@pytest.mark.parametrize("factors", [False, True])
def test_codes_of_rows_and_columns(rows, columns, dtype, factors, device) -> None:
    x = hard(rows, columns, dtype, device)
    by_column = factors_of(columns, device) if factors else None
    by_row = factors_of(rows, device, 1) if factors else None
    padding = -rows % 16
    expected = Rows(*reference.quantize(x, by_column))
    multiplied = x.float() if by_row is None else x.float() * by_row[:, None]
    turned = Rows(*reference.quantize(torch.nn.functional.pad(multiplied, (0, 0, 0, padding)).t(), None))

    same(fp8.quantize_rows_triton(x, by_column), expected)
    both = fp8.quantize_both_triton(x, by_column, by_row)
    same(both[0], expected)
    same(both[1], turned)
    maxima = fp8.Maxima(*(largest(x, factors, dim) for dim, factors in ((1, by_column), (0, by_row))))
    for ours, theirs in zip(fp8.quantize_both_triton(x, by_column, by_row, maxima), (expected, turned), strict=True):
        same(ours, theirs)
    whole = Rows(*reference.quantize(x, None))
    same(fp8.quantize_transposed_triton(x, largest(x, None, 1)), Rows(fp8.transpose(whole.codes), whole.scales))
    only, other = fp8.quantize_both_triton(x, None, by_row, rows=False)
    assert not len(only.codes)
    same(other, turned)
    same(fp8.quantize_rows(x, by_column), expected)
    for ours, theirs in zip(fp8.quantize_both(x, by_column, by_row), both, strict=True):
        same(ours, theirs)
    same(fp8.quantize_columns(x, by_row), turned)
    codes = fp8.transpose_triton(expected.codes)
    assert codes.shape == (columns, rows + padding) and torch.equal(
        codes.float().cpu(), fp8.transpose(expected.codes.cpu()).float()
    )
    assert torch.equal(codes[:, :rows].float(), expected.codes.float().t()) and not codes[:, rows:].float().any()


def largest(x: Tensor, factors: Tensor | None, dim: int) -> Tensor:
    """The largest magnitudes of rows (dim 1) or columns, as their bits."""
    values = x.float() if factors is None else x.float() * factors.unsqueeze(1 - dim)
    return values.abs().amax(dim).view(torch.int32)


@dtypes
def test_a_row_is_near_what_it_was(dtype) -> None:
    """Within half a unit of the last place, of 3 bits, of each value; of small ones, of the largest's share."""
    x = random((40, 200), dtype, "cpu")
    back = fp8.quantize_rows(x).dequantize(torch.float32)
    error, size = (back - x.float()).abs(), x.float().abs()
    assert (error <= torch.maximum(size / 16, size.amax(1, keepdim=True) / 224 * 2**-10)).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_values_become_nan(value, device) -> None:
    x = random((20, 40), torch.bfloat16, device)
    x[3, 5] = value
    w = fp8.quantize_rows(random((16, 40), torch.bfloat16, device))
    for rows in (fp8.quantize_rows(x), fp8.quantize_rows_triton(x, None), fp8.quantize_both_triton(x, None, None)[0]):
        assert rows.codes.float().isnan().nonzero().tolist() == [[3, 5]] and rows.scales.isfinite().all()
        y = fp8_products.product(rows, w, torch.float32)
        assert (
            y.isnan().all(1).nonzero().tolist()
            == [[3]]
            == fp8_products.product_triton(rows, w, torch.float32).isnan().all(1).nonzero().tolist()
        )
    columns = fp8.quantize_both_triton(x, None, None)[1]
    assert columns.codes.float().isnan().nonzero().tolist() == [[5, 3]]


def operands(m: int, n: int, k: int, device: str) -> tuple[Rows, Rows]:
    a, b = random((m, k), torch.bfloat16, device), random((n, k), torch.bfloat16, device, 1)
    return fp8.quantize_rows(a), fp8.quantize_rows(b)


def exactly(a: Rows, b: Rows) -> Tensor:
    return (a.codes.float().double() * a.scales[:, None]) @ (b.codes.float().double() * b.scales[:, None]).t()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 40, 33), (130, 140, 256), (16, 32, 300)])
def test_products(m, n, k, device, monkeypatch) -> None:
    for name in ("ADA", "UNEVEN"):  # several tiles
        monkeypatch.setattr(fp8_products, name, fp8_products.Tiles(32, 64, 4, 1))
    a, b = operands(m, n, k, device)
    exact = exactly(a, b)
    for product in (fp8_products.product, fp8_products.product_triton):
        assert (product(a, b, torch.float32) - exact).abs().max() <= 1e-6 * k * exact.abs().max()
        assert (
            product(a, b, torch.bfloat16) - exact
        ).abs().max() <= 2**-8 * exact.abs().max() + 1e-6 * k * exact.abs().max()
    summed = exact / b.scales
    for accumulate in (fp8_products.accumulate, fp8_products.accumulate_triton):
        flat = torch.full((m * n + 9,), 2.0, device=device)
        acc = flat[: m * n].view(m, n)  # a part of a buffer
        for _ in range(2):
            accumulate(acc, a, b.codes)
        assert (acc - 2 - 2 * summed).abs().max() <= 2e-6 * k * summed.abs().max().clamp(min=1)
        assert (flat[m * n :] == 2).all()
    fp8_products.accumulate(None, a, b.codes)


@dtypes
@pytest.mark.parametrize(("m", "n", "k"), [(5, 40, 33), (1, 16, 16), (130, 144, 256)])
def test_a_product_that_is_added(m, n, k, dtype, device) -> None:
    """On Hopper by cuBLASLt, if sizes are multiples of 16; else the product is rounded before it is added.

    The matrix units of Hopper keep 13 bits of the largest sum of 32 terms, so eight of them lose up to 2^-10 of it.
    """
    a, b = operands(m, n, k, device)
    x = random((m, n), dtype, device, 2)
    before, products = x.clone(), exactly(a, b)
    found, exact = fp8_products.product_add(a, b, x), x.double() + products
    lost = 2**-10 if device == "cuda" else 2**-13
    bound = torch.finfo(dtype).eps / 2 * exact.abs().max() + lost * products.abs().max()
    assert (found - exact).abs().max() <= bound * (2 if n % 16 or k % 16 else 1) and torch.equal(x, before)
    assert torch.equal(fp8_products.product_add(a, b, x), found)


def test_sums_that_cancel(device) -> None:
    """Terms of 448 * 448, in the first half of K and subtracted in the second, beside terms of 1 / 64: units that sum
    in fewer bits would lose the small ones wherever large ones are summed with them.
    """
    k = 1024
    a, b = torch.full((64, k), 448.0), torch.full((64, k), 448.0)
    a[:, k // 2 :] *= -1
    a[:, ::128], b[:, ::128] = 1 / 8, 1 / 8
    rows = [Rows(x.to(device).to(FP8), torch.ones(64, device=device)) for x in (a, b)]
    exact = exactly(*rows)
    large = 448.0**2 * 127  # of what is summed before it is promoted
    for product in (fp8_products.product, fp8_products.product_triton):
        error = (product(*rows, torch.float32) - exact).abs().max()
        assert error <= large * 2**-13, error


def test_the_gradients_of_a_linear_layer(device) -> None:
    """Forward, the input's and the weight's gradient as a layer computes them, against float64 without FP8."""
    torch.manual_seed(0)
    x, w = random((96, 128), torch.bfloat16, device), random((160, 128), torch.bfloat16, device, 1) / 8
    dy = random((96, 160), torch.bfloat16, device, 2) / 100
    rows = fp8.quantize_rows(w)
    weight, dw, apart = fp8.FP8Weight(rows, fp8.transpose(rows.codes)), *torch.zeros(2, 160, 128, device=device)
    y = linear(x, weight)
    dx = linear_backward(dw, dy, x, weight)
    accumulate_weight_grad(apart, dy, x, in_fp8=True)
    assert torch.equal(apart, dw) and torch.equal(linear_backward_input(dy, weight), dx)
    assert torch.equal(linear_backward(None, dy, x, weight), dx)
    for ours, theirs in (
        (y, x.double() @ w.double().t()),
        (dx, dy.double() @ w.double()),
        (dw, dy.double().t() @ x.double()),
    ):
        cosine = torch.nn.functional.cosine_similarity(ours.double().flatten(), theirs.flatten(), 0)
        assert cosine > 0.998


def test_no_rows(device) -> None:
    x = torch.empty(0, 32, dtype=torch.bfloat16, device=device)
    w = fp8.quantize_rows(torch.ones(16, 32, dtype=torch.bfloat16, device=device))
    for rows, columns in (fp8.quantize_both(x, None, None), fp8.quantize_both_triton(x, None, None)):
        assert rows.codes.shape == (0, 32) and columns.codes.shape == (32, 0)
        assert fp8_products.product(rows, w, torch.bfloat16).shape == (0, 16)
        acc = torch.ones(32, 16, device=device)
        fp8_products.accumulate(acc, columns, torch.empty(16, 0, device=device).to(FP8))
        assert (acc == 1).all()


def test_libraries_by_compute_capability_and_cuda() -> None:
    both = (torch.bfloat16, torch.float32)
    found = {(8, 0): (), (8, 6): (), (8, 9): both[:1], (9, 0): both, (10, 0): both[:1], (11, 0): (), (12, 0): ()}
    assert {card: fp8_products._library(nvidia(*card), (13, 0)) for card in found} == found
    hopper = nvidia(9, 0)
    assert fp8_products._library(hopper, (12, 9)) == both and fp8_products._library(hopper, (12, 8)) == both[:1]


def test_products_that_are_added_by_compute_capability_cuda_and_library(monkeypatch) -> None:
    monkeypatch.setattr(cublaslt, "_library", object)
    cards = (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
    assert [card for card in cards if cublaslt.has_products(nvidia(*card), (13, 0))] == [(9, 0)]
    hopper = nvidia(9, 0)
    assert cublaslt.has_products(hopper, (12, 9)) and not cublaslt.has_products(hopper, (12, 8))
    monkeypatch.setattr(cublaslt, "_library", lambda: None)
    assert not cublaslt.has_products(hopper, (13, 0))
