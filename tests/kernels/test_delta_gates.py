"""The gates' kernels against the reference."""

import pytest
import torch
from torch import Tensor

from rptrain.kernels import delta_gates as ours
from rptrain.kernels.reference import delta_gates as reference

from .exact import close, dtypes, no_worse, random


def results(triton: bool, dys: Tensor, ba: Tensor, rest: Tensor, by_head: bool):
    """decay, beta, the gradient of the product [T, K, 2 r] or [T, 2, K, r], and those of a_log and dt_bias."""
    forward, backward = (
        (ours.gates_triton, ours.gates_backward_triton) if triton else (reference.gates, reference.gates_backward)
    )
    (ddecay, dbeta), (a_log, dt_bias) = dys, rest
    grad, sums, in_place = torch.zeros_like(ba), torch.ones_like(rest), ba.clone()
    (b, a), (db, da), places = (x.chunk(2, -1) if by_head else x.unbind(1) for x in (ba, grad, in_place))
    decay, beta = forward(b, a, a_log, dt_bias)
    backward(ddecay, dbeta, b, a, a_log, dt_bias, (db, da), (sums[0], sums[1]))
    b, a = places
    backward(ddecay, dbeta, b, a, a_log, dt_bias, (b, a), (None, None))
    assert torch.equal(in_place, grad)
    return decay, beta, grad, sums - 1


@pytest.mark.sample(4)
@dtypes
@pytest.mark.parametrize(("tokens", "heads", "repeat"), [(200, 2, 3), (1, 1, 1), (37, 3, 2)])
@pytest.mark.parametrize("by_head", [False, True])
def test_forward_and_backward(tokens, heads, repeat, by_head, dtype, device, monkeypatch) -> None:
    monkeypatch.setattr(ours, "TILE", 128)
    shape = (tokens, heads, 2 * repeat) if by_head else (tokens, 2, heads, repeat)
    ba = 4 * random(shape, dtype, device)
    rest = random((2, heads * repeat), torch.float32, device, 1)
    dys = random((2, tokens, heads * repeat), torch.float32, device, 2)
    decay, beta, grad, sums = results(True, dys, ba, rest, by_head)
    _, their_beta, their_grad, _ = results(False, dys, ba, rest, by_head)
    wide_decay, wide_beta, wide_grad, wide_sums = results(False, dys.double(), ba.double(), rest.double(), by_head)
    close(decay, wide_decay)
    no_worse(beta.to(dtype), their_beta.to(dtype), wide_beta)
    assert torch.equal(beta, beta.to(dtype).float())
    no_worse(grad, their_grad, wide_grad)
    close(sums, wide_sums)


def test_softplus_of_large_and_small_values(device) -> None:
    """Precise where it nearly vanishes, as a float32 of its own."""
    x = torch.tensor([-80.0, -20, -16, -5, -1e-3, 0, 3, 25, 100], device=device).view(1, 9, 1)
    zeros = torch.zeros(9, device=device)
    decay, _ = ours.gates_triton(x, x, zeros, zeros)
    expected = -torch.log1p(torch.exp(x.double())).flatten()
    expected[-1] = -100
    torch.testing.assert_close(decay[0].double(), expected, rtol=1e-5, atol=0)


def test_no_tokens(device) -> None:
    ba, rest, dys = torch.empty(0, 2, 2, 2), torch.zeros(2, 4), torch.empty(2, 0, 4)
    decay, beta, _, sums = results(True, *(x.to(device) for x in (dys, ba, rest)), by_head=False)
    assert decay.shape == beta.shape == (0, 4) and not sums.any()
