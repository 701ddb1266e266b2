import pytest
import torch

from rptrain.kernels.linear import accumulate_weight_grad, linear, linear_backward_input
from rptrain.kernels.reference import wide

DTYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "inner", "outer"), [(9, 5, 7), (1, 1, 1), (130, 24, 8)])
def test_linear_and_its_gradients(tokens, inner, outer, dtype, device) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(tokens, inner).to(device, dtype), torch.randn(outer, inner).to(device, dtype)
    dy = torch.randn(tokens, outer).to(device, dtype)
    acc = torch.ones(outer, inner, dtype=wide(dtype), device=device)
    accumulate_weight_grad(acc, dy, x)

    x64, w64 = (tensor.to(torch.float64, copy=True).requires_grad_() for tensor in (x, w))
    y64 = x64 @ w64.T
    y64.backward(dy.double())
    for ours, theirs, tolerance in (
        (linear(x, w), y64, DTYPES[dtype]),
        (linear_backward_input(dy, w), x64.grad, DTYPES[dtype]),
        (acc - 1, w64.grad, min(DTYPES[dtype], 1e-5)),  # sums are wide: no rounding to 16 bits
    ):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_keeps_what_16_bits_would_lose(device) -> None:
    acc = torch.full((1, 1), 1024.0, device=device)
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    for _ in range(3):
        accumulate_weight_grad(acc, one, one)
    assert acc.item() == 1027
