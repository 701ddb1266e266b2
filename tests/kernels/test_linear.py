import pytest
import torch

from rptrain.engine.reproducible import Reproducible
from rptrain.kernels import grouped
from rptrain.kernels import linear as module
from rptrain.kernels.linear import accumulate_weight_grad, linear, linear_backward_input
from rptrain.kernels.reference.dense import wide

DTYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sum_may_be_a_view_of_a_flat_buffer(dtype, device) -> None:
    """As gradients lie in a slot: what is beside the view stays. dy may be the first columns of a wider buffer."""
    torch.manual_seed(0)
    x, dy = torch.randn(40, 24).to(device, dtype), torch.randn(40, 64).to(device, dtype)[:, :7]
    flat = torch.randn(128 + 7 * 24 + 88, device=device)
    before = flat.double()
    acc = flat[128:][: 7 * 24].view(7, 24)
    for _ in range(2):
        accumulate_weight_grad(acc, dy, x)
    change = flat.double() - before
    product = 2 * dy.double().T @ x.double()
    assert (change[128:-88].view(7, 24) - product).abs().max() <= 1e-5 * product.abs().max()
    assert not change[:128].any() and not change[-88:].any()


def test_where_products_are_summed_in_float16_the_weights_gradient_is_not(device, monkeypatch) -> None:
    """It is left to a kernel of ours: the libraries have no such product with a float32 result."""
    calls = []

    def watched(*tensors) -> None:
        calls.append(tensors)
        grouped.grouped_weight_grad_triton(*tensors)

    monkeypatch.setattr(module, "grouped_weight_grad_triton", watched)
    monkeypatch.setattr(module, "fused", lambda *tensors: True)  # as on CUDA
    monkeypatch.setattr(grouped, "_tiles", lambda x: grouped.Tiles(16, 32, 16, 4, 1))
    tokens = 3000  # more ones than float16 can add
    wide_dy, x = torch.ones(tokens, 40, device=device), torch.ones(tokens, 24, device=device)
    dy = wide_dy.half()[:, :7]
    for wanted in (False, True):
        settings = Reproducible(cuda=False, fp16_accumulation=wanted)
        for dtype in (torch.float16, torch.bfloat16):
            acc = torch.full((7, 24), 0.5, device=device)
            accumulate_weight_grad(acc, dy.to(dtype), x.to(dtype))
            assert torch.equal(acc, torch.full_like(acc, 0.5 + tokens))
        settings.restore()
        assert len(calls) == wanted
