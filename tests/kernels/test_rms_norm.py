"""The norm's kernels against the reference, as torch's autograd has them, and against themselves."""

import pytest
import torch

from rptrain.kernels import fp8, rms_norm
from rptrain.kernels.fp8 import Form
from rptrain.kernels.launch import programs
from rptrain.kernels.reference import dense as reference
from tests.kernels.exact import close, dtypes, exact, no_worse, random

from .autograd import RMSNorm
from .test_fp8 import same

SHAPES = [(7, 5), (1, 1), (3, 4, 6), (37, 130), (2, 1024)]
shapes = pytest.mark.parametrize("shape", SHAPES)
kinds = pytest.mark.parametrize("zero_centered", [False, True])
EPS = 1e-3


@pytest.mark.sample(5)
@dtypes
@shapes
@kinds
def test_forward(zero_centered, shape, dtype, device) -> None:
    x, w = random(shape, dtype, device), random(shape[-1:], dtype, device, 1)
    total, y, rstd = rms_norm.rms_norm_triton(x, None, w, EPS, zero_centered=zero_centered)
    assert total is x and y.dtype == dtype and rstd.dtype == torch.float32
    wide_y, wide_rstd = reference.rms_norm(*exact(x, w), EPS, zero_centered=zero_centered)
    no_worse(y, reference.rms_norm(x, w, EPS, zero_centered=zero_centered)[0], wide_y)
    close(rstd, wide_rstd)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zero_centered_norms_round_once(dtype, device) -> None:
    """All but the values beside the middle of two numbers are the exact ones, rounded."""
    x, w = random((37, 130), dtype, device), random((130,), dtype, device, 1)
    expected = reference.rms_norm(*exact(x, w), EPS, zero_centered=True)[0].to(dtype)
    theirs, _ = reference.rms_norm(x, w, EPS, zero_centered=True)
    _, ours, _ = rms_norm.rms_norm_triton(x, None, w, EPS, zero_centered=True)
    for y in (ours, theirs):
        assert (y != expected).double().mean() <= 2e-3


@pytest.mark.sample(5)
@dtypes
@shapes
@kinds
def test_forward_with_the_residual(zero_centered, shape, dtype, device) -> None:
    x, residual, w = (random(size, dtype, device, i) for i, size in enumerate((shape, shape, shape[-1:])))
    total, y, rstd = rms_norm.rms_norm_triton(x, residual, w, EPS, zero_centered=zero_centered)
    assert torch.equal(total, x + residual)
    _, same_y, same_rstd = rms_norm.rms_norm_triton(total, None, w, EPS, zero_centered=zero_centered)
    assert torch.equal(y, same_y) and torch.equal(rstd, same_rstd)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5), (1, 1), (37, 130)])
@pytest.mark.parametrize("form", [Form.ROWS, Form.PLAIN | Form.ROWS])
@kinds
def test_forward_in_fp8(zero_centered, shape, form, dtype, device) -> None:
    """The codes are those of the rounded result; NaN is kept."""
    x, residual, w = (random(size, dtype, device, i) for i, size in enumerate((shape, shape, shape[-1:])))
    x[0, 0] = torch.nan
    total, y, rstd = rms_norm.rms_norm_triton(x, residual, w, EPS, zero_centered=zero_centered)
    for operation in (rms_norm.rms_norm_operand_triton, rms_norm.rms_norm_operand):
        same_total, operand, same_rstd = operation(x, residual, w, EPS, form, zero_centered=zero_centered)
        equal(same_total, total)
        fused = device == "cuda" or operation is rms_norm.rms_norm_operand_triton
        plain = y if fused else reference.rms_norm(total, w, EPS, zero_centered=zero_centered)[0]
        same(operand.in_fp8(), fp8.quantize_rows(plain))
        torch.testing.assert_close(same_rstd, rstd, equal_nan=True)
        assert (operand.plain is not None) == (Form.PLAIN in form) and operand.rows is not None
    assert operand.rows.codes[0].float().isnan().all()


def equal(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sample(8)
@dtypes
@shapes
@pytest.mark.parametrize("residual", [False, True])
@kinds
def test_backward(zero_centered, shape, residual, dtype, device) -> None:
    x, dy, w = random(shape, dtype, device), random(shape, dtype, device, 1), random(shape[-1:], dtype, device, 2)
    past = random(shape, dtype, device, 3) if residual else None
    rstd = reference.rms_norm(x, w, EPS)[1]

    def results(backward, x, dy, w, rstd, past):
        grad_w = torch.ones(shape[-1], dtype=rstd.dtype, device=device)
        return backward(dy, x, w, rstd, grad_w, past, zero_centered=zero_centered), grad_w - 1

    dx, grad_w = results(rms_norm.rms_norm_backward_triton, x, dy, w, rstd, past)
    their_dx, _ = results(reference.rms_norm_backward, x, dy, w, rstd, past)
    wide = exact(x, dy, w)
    wide_rstd = reference.rms_norm(wide[0], wide[2], EPS)[1]
    wide_dx, wide_grad_w = results(
        reference.rms_norm_backward, *wide, wide_rstd, None if past is None else past.double()
    )
    no_worse(dx, their_dx, wide_dx)
    close(grad_w, wide_grad_w)
    again = results(rms_norm.rms_norm_backward_triton, x, dy, w, rstd, past)
    assert torch.equal(again[0], dx) and torch.equal(again[1], grad_w)


@pytest.mark.sample(4)
@dtypes
@pytest.mark.parametrize(("rows", "stages"), [(1, 3), (2, 1), (8, 4)])
def test_backward_by_tiles(rows, stages, dtype, device) -> None:
    """Several tiles a program, the last one not full; loaded ahead or not."""
    tokens = 4 * rows * programs(torch.device(device), 1) - 1
    x, dy, past = (random((tokens, 96), dtype, device, seed) for seed in range(3))
    w = random((96,), dtype, device, 3)
    rstd = reference.rms_norm(x, w, EPS)[1]
    grad_w, again = torch.ones(2, 96, device=device)
    wide_grad_w = torch.ones(96, dtype=torch.float64, device=device)
    sizes = rms_norm.Sizes(rows, warps=4, stages=stages, programs=1)
    dx = rms_norm.rms_norm_backward_triton(dy, x, w, rstd, grad_w, past, sizes)
    assert torch.equal(rms_norm.rms_norm_backward_triton(dy, x, w, rstd, again, past, sizes), dx)
    assert torch.equal(grad_w, again)
    wide_dx = reference.rms_norm_backward(*exact(dy, x, w, rstd), wide_grad_w, past.double())
    no_worse(dx, reference.rms_norm_backward(dy, x, w, rstd, again, past), wide_dx)
    close(grad_w, wide_grad_w)


@pytest.mark.parametrize("rows", [1, 150, 1100])
def test_partial_sums(rows, device) -> None:
    """Fewer and more than are added at a time, columns that fill no block, and two accumulators."""
    partials = random((rows, 2, 45), torch.float32, device)
    totals = [torch.ones(45, device=device), torch.zeros(45, device=device)]
    rms_norm.add_partials(partials, totals)
    close(totals[0], partials[:, 0].double().sum(0) + 1)
    close(totals[1], partials[:, 1].double().sum(0))


@dtypes
def test_no_rows(dtype, device) -> None:
    x, w = torch.empty(0, 6, dtype=dtype, device=device), random((6,), dtype, device)
    grad_w = torch.ones(6, device=device)
    _, y, rstd = rms_norm.rms_norm_triton(x, x, w, EPS)
    dx = rms_norm.rms_norm_backward_triton(y, x, w, rstd, grad_w, None)
    assert y.shape == dx.shape == (0, 6) and rstd.shape == (0,) and torch.equal(grad_w, torch.ones_like(grad_w))


def test_autograd_in_float64() -> None:
    x, w = random((5, 6), torch.float64, "cpu").requires_grad_(), random((6,), torch.float64, "cpu").requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: RMSNorm.apply(x, w, EPS), (x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_adds_the_residual_before_and_its_gradient_after(dtype) -> None:
    x, residual, dy, past = (random((5, 6), dtype, "cpu", seed).requires_grad_() for seed in range(4))
    w = random((6,), dtype, "cpu", 4)
    total, y, rstd = rms_norm.rms_norm_operand(x, residual, w, EPS, Form.PLAIN)
    grads = torch.autograd.grad((total, y.plain), (x, residual), (past, dy))
    with torch.no_grad():
        ours = rms_norm.rms_norm_backward(dy, total, w, rstd, torch.zeros_like(w), past)
    for theirs in grads:
        torch.testing.assert_close(ours, theirs)
