"""Grouped products and their gradients against the reference: empty experts, one expert, odd sizes, either layout."""

import pytest
import torch
from torch import Tensor

from rptrain.kernels import grouped
from rptrain.kernels.grouped import Tiles
from rptrain.kernels.reference import moe as reference
from tests.kernels.exact import close, dtypes, no_worse, random

CASES = [  # rows of each expert; inner and outer size; whether weights are stored as [E, out, in]
    ([1], 1, 1, False),
    ([37], 16, 48, True),
    ([0, 5, 0, 17, 33, 0], 35, 17, False),
    ([0, 5, 0, 17, 33, 0], 16, 33, True),
    ([16, 16, 1], 32, 32, False),
    ([0, 0, 3], 17, 8, True),
    ([0] * 20 + [1, 2], 5, 3, False),
]
cases = pytest.mark.parametrize(("counts", "inner", "outer", "transposed"), CASES)


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Tiles that tiny products fill."""
    monkeypatch.setattr(grouped, "_tiles", lambda x: Tiles(16, 32, 16, 4, 1))


def ends(counts: list[int], device: str) -> Tensor:
    return torch.tensor(counts).cumsum(0).int().to(device)


def stored(experts: int, inner: int, outer: int, dtype: torch.dtype, device: str, transposed: bool) -> Tensor:
    w = random((experts, inner, outer), dtype, device, 1)
    return w.mT.contiguous().mT if transposed else w


@pytest.mark.sample(4)
@cases
@dtypes
def test_product(counts, inner, outer, dtype, transposed, device) -> None:
    x, at = random((sum(counts), inner), dtype, device), ends(counts, device)
    w, bias = stored(len(counts), inner, outer, dtype, device, transposed), random((len(counts), outer), dtype, device)
    for given in (bias, None):
        ours = grouped.grouped_mm_triton(x, w, at, given)
        exact = reference.grouped_mm(x.double(), w.double(), at, None if given is None else given.double())
        no_worse(ours, exact.to(dtype), exact)
        assert torch.equal(ours, grouped.grouped_mm_triton(x, w, at, given))
    plain = grouped.grouped_mm_triton(x, w, at)
    expected = plain.clone()
    for expert, rows in reference.groups(at):
        expected[rows] += bias[expert]
    assert torch.equal(grouped.add_bias_triton(plain, bias, at), expected)


@pytest.mark.sample(4)
@cases
@dtypes
def test_adding_a_product(counts, inner, outer, dtype, transposed, device) -> None:
    x, at = random((sum(counts), inner), dtype, device), ends(counts, device)
    w = stored(len(counts), inner, outer, dtype, device, transposed)
    before = random((sum(counts), outer), dtype, device, 2)
    exact = before.double() + reference.grouped_mm(x.double(), w.double(), at, None)
    ours, plain = before.clone(), before.clone()
    grouped.grouped_mm_add_triton(x, w, at, ours)
    no_worse(ours, exact.to(dtype), exact)
    reference.grouped_mm_add(x, w, at, plain)
    no_worse(plain, exact.to(dtype), exact)


@pytest.mark.sample(4)
@cases
@dtypes
def test_gradients_add_up_in_float32_and_leave_empty_experts(counts, inner, outer, dtype, transposed, device) -> None:
    x, dy, at = (
        random((sum(counts), inner), dtype, device),
        random((sum(counts), outer), dtype, device, 1),
        ends(counts, device),
    )
    before = stored(len(counts), inner, outer, torch.float32, device, transposed)
    exact = before.double()
    reference.grouped_weight_grad(exact, x.double(), dy.double(), at)
    runs = [before.clone(), before.clone()]
    for acc in runs:
        grouped.grouped_weight_grad_triton(acc, x, dy, at)
    close(runs[0], exact)
    assert torch.equal(*runs)

    bias = random((len(counts), outer), torch.float32, device, 2)
    ours, exact = bias.clone(), bias.double()
    grouped.grouped_bias_grad_triton(ours, dy, at)
    reference.grouped_bias_grad(exact, dy.double(), at)
    close(ours, exact)
    for expert, count in enumerate(counts):
        if not count:
            assert torch.equal(runs[0][expert], before[expert])
            assert torch.equal(ours[expert], bias[expert])


def test_rows_may_be_part_of_a_wider_tensor(device) -> None:
    wide, at = random((9, 40), torch.float32, device), ends([4, 5], device)
    w, dy = random((2, 8, 6), torch.float32, device), random((9, 6), torch.float32, device)
    ours, acc = grouped.grouped_mm_triton(wide[:, 16:24], w, at), torch.zeros_like(w)
    grouped.grouped_weight_grad_triton(acc, wide[:, 16:24], dy, at)
    expected = torch.zeros_like(w)
    reference.grouped_weight_grad(expected, wide[:, 16:24], dy, at)
    close(acc, expected)
    close(ours, reference.grouped_mm(wide[:, 16:24], w, at, None))


@dtypes
def test_what_the_gpu_chooses(dtype, device, monkeypatch) -> None:
    """The public functions; on Hopper the product is torch's in bfloat16."""
    monkeypatch.undo()
    x, at = random((50, 64), dtype, device), ends([20, 0, 30], device)
    w, bias = random((3, 64, 32), dtype, device), random((3, 32), dtype, device)
    for weight in (w, w.mT.contiguous().mT):
        exact = reference.grouped_mm(x.double(), weight.double(), at, bias.double())
        no_worse(grouped.grouped_mm(x, weight, at, bias), reference.grouped_mm(x, weight, at, bias), exact)
