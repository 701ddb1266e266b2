"""Grouped products in FP8: codes exactly, products within rounding of their result in float64, in either layout."""

import pytest
import torch
from torch import Tensor

from rptrain.kernels import fp8, fp8_products, grouped_fp8, moe
from rptrain.kernels.fp8 import FP8Weight, Rows
from rptrain.kernels.reference import fp8 as by_row
from rptrain.kernels.reference import grouped_fp8 as reference
from rptrain.kernels.reference import moe as exactly
from tests.kernels.exact import random
from tests.kernels.test_fp8 import factors_of, same

layouts = pytest.mark.parametrize("by_input", [False, True], ids=["by_output", "by_input"])
COUNTS = ([1], [0, 5, 0, 130, 3, 0], [0] * 8 + [1, 2], [37], [0, 0, 300], [128, 1, 256])
counts_of_rows = pytest.mark.parametrize("counts", COUNTS)


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Tiles that tiny products fill."""
    for name in ("ADA", "UNEVEN"):
        monkeypatch.setattr(fp8_products, name, fp8_products.Tiles(32, 64, 4, 1))


def ends_of(counts: list[int], device: str) -> Tensor:
    return torch.tensor(counts).cumsum(0).int().to(device)


def rows_of(counts: list[int], size: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Rows of many magnitudes, one of them zero; the rows of an expert differ from those of the next one."""
    x = random((sum(counts), size), torch.float32, "cpu", seed)
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x *= torch.exp2(torch.arange(len(x)) % 5 - experts % 3)[:, None]
    if len(x) > 1:
        x[1] = 0
    return x.to(device, dtype)


def weight(experts: int, inner: int, outer: int, device: str, by_input: bool) -> tuple[FP8Weight, Tensor]:
    """Experts' weights in FP8 as they are prepared, and [E, K, M] in float64."""
    shape = (experts, inner, outer) if by_input else (experts, outer, inner)
    w = random(shape, torch.bfloat16, device, 5)
    rows = Rows(torch.empty(shape, device=device).to(fp8.FP8), torch.empty(shape[:2], device=device))
    found = FP8Weight(rows, torch.empty_like(rows.codes.mT, memory_format=torch.contiguous_format), by_input)
    found.write(w if by_input else w.view(-1, inner))
    wide = rows.codes.double() * rows.scales[..., None]
    return found, wide if by_input else wide.mT


def near(ours: Tensor, exact: Tensor) -> None:
    """Within rounding of the sums, and of a narrower result.

    The matrix units of Hopper keep 13 bits of the largest sum of 32 terms, so four of them lose up to 2^-11 of it, and
    it may be larger than the result.
    """
    unit = 1e-5 if ours.device.type == "cpu" else 2**-10
    last = torch.finfo(ours.dtype).eps if ours.dtype != torch.float32 else 0
    assert ((ours - exact).abs() <= last * exact.abs() + unit * exact.abs().max()).all()


@pytest.mark.sample(2, gate=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@counts_of_rows
def test_codes_in_segments(counts, dtype, device) -> None:
    x, ends, size = rows_of(counts, 48, dtype, device), ends_of(counts, device), 48
    factors, by_expert = factors_of(len(x), device), factors_of(len(counts) * size, device, 1).view(-1, size)
    for ours in (grouped_fp8.quantize_rows(x, by_expert, ends), grouped_fp8.quantize_rows_triton(x, by_expert, ends)):
        for expert, rows in exactly.groups(ends):
            same(Rows(*(part[rows] for part in ours)), Rows(*by_row.quantize(x[rows], by_expert[expert])))
    same(grouped_fp8.quantize_rows(x, None, ends), Rows(*by_row.quantize(x, None)))
    columns = [f(x, factors, ends) for f in (grouped_fp8.quantize_columns, grouped_fp8.quantize_columns_triton)]
    codes = fp8.quantize_rows(x).codes
    turned = [f(codes, ends).float() for f in (grouped_fp8.transpose, grouped_fp8.transpose_triton)]
    used = 0
    for expert, rows, at in reference._segments(ends, grouped_fp8.SEGMENT):
        count = rows.stop - rows.start
        expected = Rows(*by_row.quantize(x[rows].t(), factors[rows]))
        used = at + -(-count // grouped_fp8.SEGMENT) * grouped_fp8.SEGMENT
        for ours in columns:
            same(Rows(ours.codes[:, at : at + count], ours.scales[expert]), expected)
            assert not ours.codes[:, at + count : used].float().any()
        for ours in turned:
            assert torch.equal(ours[:, at : at + count], codes[rows].float().t())
            assert not ours[:, at + count : used].any()
    assert used <= grouped_fp8.length(len(x), len(counts)) == columns[0].codes.shape[1]


def test_the_length_holds_every_distribution_of_rows() -> None:
    assert [grouped_fp8.length(*sizes) for sizes in ((0, 4), (1, 4), (3, 2), (129, 1), (130, 9))] == [
        0, 128, 256, 256, 128 * 9,
    ]  # fmt: skip


@pytest.mark.sample(4, gate=8)
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@counts_of_rows
@pytest.mark.parametrize(("inner", "outer"), [(128, 48), (192, 80), (48, 16)])
def test_products_and_gradients(counts, inner, outer, dtype, by_input, device) -> None:
    """Of what the codes are worth: quantized rows of an input give the exact sums of quantized products."""
    ends, experts = ends_of(counts, device), len(counts)
    w, exact = weight(experts, inner, outer, device, by_input)
    x, dy = rows_of(counts, inner, dtype, device), rows_of(counts, outer, dtype, device, 1)
    bias = random((experts, outer), dtype, device, 2)

    rows = grouped_fp8.quantize_rows(x, w.rows.scales, ends) if by_input else fp8.quantize_rows(x)
    other = grouped_fp8.quantize_rows(dy, w.rows.scales, ends) if not by_input else fp8.quantize_rows(dy)
    scales = w.rows.scales
    for taken, first, side, added in (
        (rows, w.columns if by_input else w.rows.codes, by_input, bias),
        (other, w.rows.codes if by_input else w.columns, not by_input, None),
    ):
        assert first is not None
        wide = first.double() if side else first.double() * scales[..., None]
        expected = exactly.grouped_mm(
            taken.codes.double() * taken.scales[:, None], wide.mT, ends, None if added is None else added.double()
        )
        for f in (grouped_fp8.product, grouped_fp8.product_triton):
            near(f(taken, first, None if side else scales, ends, added, dtype), expected)
    given = x if by_input else rows
    y = grouped_fp8.grouped_mm(given, w, ends, bias, dtype)
    dx = grouped_fp8.grouped_mm_transposed(dy, w, ends)
    for ours, theirs in (
        (y, exactly.grouped_mm(x.double(), exact, ends, bias.double())),
        (dx, exactly.grouped_mm(dy.double(), exact.mT, ends, None)),
    ):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm() and ours.dtype == dtype


@pytest.mark.sample(6)
@layouts
@counts_of_rows
def test_gradients_of_weights_add_up_and_leave_empty_experts(counts, by_input, device) -> None:
    inner, outer, ends, experts = 48, 80, ends_of(counts, device), len(counts)
    x, dy = (rows_of(counts, size, torch.bfloat16, device, size) for size in (inner, outer))
    a, b = (x, dy) if by_input else (dy, x)
    rows = fp8.quantize_rows(b)
    columns = grouped_fp8.quantize_columns(a, rows.scales, ends)
    before = random((experts, a.shape[1], b.shape[1]), torch.float32, device)
    exact, close = before.double(), before.double()
    for expert, group, at in reference._segments(ends, grouped_fp8.SEGMENT):
        codes = columns.codes[:, at : at + group.stop - group.start].double() * columns.scales[expert][:, None]
        exact[expert] += codes @ rows.codes[group].double()
        close[expert] += a[group].double().t() @ b[group].double()
    turned = grouped_fp8.transpose(rows.codes, ends)
    columns.scales[torch.tensor(counts, device=device) == 0] = torch.nan  # as they are if a kernel leaves them
    for f in (grouped_fp8.accumulate, grouped_fp8.accumulate_triton):
        flat = torch.full((before.numel() + 9,), 2.0, device=device)
        acc = flat[: before.numel()].view(before.shape).copy_(before)  # a part of a buffer
        f(acc, columns, turned, ends)
        near(acc, exact)
        assert (flat[before.numel() :] == 2).all()
        assert all(torch.equal(acc[expert], before[expert]) for expert, count in enumerate(counts) if not count)
    acc = before.clone()
    grouped_fp8.grouped_weight_grad(acc, x, dy, ends, by_input=by_input)
    near(acc, exact)
    assert (acc - close).norm() <= 0.05 * (close - before).norm()
    if not by_input:
        again = before.clone()
        grouped_fp8.grouped_weight_grad(again, rows, dy, ends)
        assert torch.equal(again, acc)
    grouped_fp8.grouped_weight_grad(None, x, dy, ends)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@layouts
def test_nonfinite_values_become_nan(by_input, value, device) -> None:
    counts, inner, outer = [3, 0, 20], 48, 32
    ends, (w, _) = ends_of(counts, device), weight(3, inner, outer, device, by_input)
    x, dy = (random((23, size), torch.bfloat16, device) for size in (inner, outer))
    x[20, 5] = value
    assert grouped_fp8.grouped_mm(x, w, ends, None, x.dtype).isnan().any(1).nonzero().tolist() == [[20]]
    assert grouped_fp8.grouped_mm_transposed(dy, w, ends).isfinite().all()
    acc = torch.zeros(w.rows.codes.shape, device=device)
    grouped_fp8.grouped_weight_grad(acc, x, dy, ends, by_input=by_input)
    wrong = (acc if by_input else acc.mT).isnan()
    assert wrong[2, 5].all() and wrong.sum() == outer
    codes, factors = grouped_fp8.quantize_columns_triton(x, torch.ones(23, device=device), ends)
    assert codes.float()[:, : 128 * 2].isnan().nonzero().tolist() == [[5, 128 + 17]] and factors[2, 5] == 1
    rows = grouped_fp8.quantize_rows_triton(x, torch.ones(3, inner, device=device), ends)
    assert rows.codes.float().isnan().nonzero().tolist() == [[20, 5]]


def test_rows_of_tokens_are_gathered_with_their_scales(device) -> None:
    x = rows_of([20], 32, torch.bfloat16, device)
    choice = moe.choose(random((20, 5), torch.float32, device), 2)
    perm = moe.permute(choice, 5)
    rows = grouped_fp8.gather_codes(fp8.quantize_rows(x), perm)
    same(rows, fp8.quantize_rows(x[perm.order.long() // 2]))


def test_no_rows(device) -> None:
    ends, (w, _) = ends_of([0, 0], device), weight(2, 32, 16, device, False)
    x, dy, acc = *(torch.empty(0, size, device=device) for size in (32, 16)), torch.ones(2, 16, 32, device=device)
    assert grouped_fp8.grouped_mm(x, w, ends, None, x.dtype).shape == (0, 16)
    rows = grouped_fp8.quantize_rows_triton(x, torch.ones(2, 32, device=device), ends)
    assert grouped_fp8.product_triton(rows, w.rows.codes, None, ends, None, x.dtype).shape == (0, 16)
    grouped_fp8.grouped_weight_grad(acc, x, dy, ends)
    columns = grouped_fp8.quantize_columns_triton(dy, torch.ones(0, device=device), ends)
    grouped_fp8.accumulate_triton(acc, columns, grouped_fp8.transpose_triton(rows.codes, ends), ends)
    assert (acc == 1).all()


@layouts
def test_weights_of_experts_are_transposed_one_by_one(by_input, device) -> None:
    w, _ = weight(3, 48, 32, device, by_input)
    assert w.columns is not None
    for turned in (w.columns, fp8.transpose_triton(w.rows.codes)):
        assert torch.equal(turned.float(), w.rows.codes.float().mT)
    if not by_input:  # as MXFP4 stores those of [E, in, out]
        wide = random((3, 32, 48), torch.bfloat16, device).mT
        w.write(wide)
        for matrix, codes, scales in zip(wide, *w.rows, strict=True):
            same(Rows(codes, scales), fp8.quantize_rows(matrix.t()))
