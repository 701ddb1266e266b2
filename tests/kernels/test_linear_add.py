import pytest
import torch

from rptrain.kernels.linear import linear_add

DTYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "inner", "outer"), [(9, 5, 7), (1, 1, 1), (130, 24, 8)])
def test_product_and_residual_in_both_ways(tokens, inner, outer, dtype, device) -> None:
    torch.manual_seed(0)
    x, w, residual = (
        torch.randn(*shape).to(device, dtype) for shape in ((tokens, inner), (outer, inner), (tokens, outer))
    )
    before = residual.clone()
    y = linear_add(x, w, residual)
    expected = before.double() + x.double() @ w.double().T
    assert (y.double() - expected).abs().max() <= DTYPES[dtype] * expected.abs().max()
    assert torch.equal(residual, before)
    assert linear_add(x, w, residual, overwrite=True) is residual and torch.equal(residual, y)
