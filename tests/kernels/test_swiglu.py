"""SwiGLU's kernels against the reference, and the clamped form against transformers."""

import pytest
import torch

from rptrain.kernels import fp8, swiglu
from rptrain.kernels.fp8 import Operand, Rows
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.swiglu import Clamp
from tests.kernels.exact import dtypes, exact, no_worse, random

from .autograd import SwiGLU
from .test_fp8 import factors_of, same

sizes = pytest.mark.parametrize(("tokens", "size"), [(5, 3), (1, 1), (3, 1100), (2, 2048)])
forms = pytest.mark.parametrize(
    ("interleaved", "clamp"),
    [(False, None), (True, None), (False, Clamp()), (True, Clamp(1.5, 2.0))],
)


def inputs(tokens, size, dtype, device):
    """Some values at the limit of the clamp, many beyond it."""
    gate_up = 5 * random((tokens, 2 * size), dtype, device)
    gate_up[0, :2] = 7
    return random((tokens, size), dtype, device, 1), gate_up


@pytest.mark.sample(10)
@dtypes
@sizes
@forms
def test_forward_and_backward(tokens, size, interleaved, clamp, dtype, device) -> None:
    dy, gate_up = inputs(tokens, size, dtype, device)
    form = (interleaved, clamp)
    wide_dy, wide = exact(dy, gate_up)
    out = swiglu.swiglu_triton(gate_up, *form)
    no_worse(out, reference.swiglu(gate_up, *form), reference.swiglu(wide, *form))
    grad = swiglu.swiglu_backward_triton(dy, gate_up, None, None, *form)
    theirs = reference.swiglu_backward(dy, gate_up, None, None, *form)
    no_worse(grad, theirs, reference.swiglu_backward(wide_dy, wide, None, None, *form))

    in_place, activation = gate_up.clone(), dy.clone()
    result = swiglu.swiglu_backward_triton(activation, in_place, in_place, activation, *form)
    assert result is in_place and torch.equal(result, grad) and torch.equal(activation, out)


in_fp8 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.mark.sample(6)
@in_fp8
@sizes
@pytest.mark.parametrize("longest", [16384, 64])
def test_rows_in_fp8(tokens, size, longest, dtype, device, monkeypatch) -> None:
    """Those of the rounded activation, of rows that fit into registers and of longer ones."""
    monkeypatch.setattr(swiglu, "LONGEST", longest)
    _, gate_up = inputs(tokens, size, dtype, device)
    for row in range(tokens):  # the largest value in each of the first blocks
        column = (64 * row + 5) % size
        gate_up[row, column] = gate_up[row, size + column] = 60
    same(swiglu.swiglu_rows_triton(gate_up).in_fp8(), fp8.quantize_rows(swiglu.swiglu_triton(gate_up, False, None)))


@pytest.mark.sample(3)
@in_fp8
@pytest.mark.parametrize(("tokens", "size"), [(5, 3), (1, 1), (40, 200)])
def test_backward_that_finds_maxima(tokens, size, dtype, device, monkeypatch) -> None:
    """The same results as without, and codes from the maxima as from a pass over the results."""
    monkeypatch.setattr(swiglu, "TILES", swiglu.Tiles(2, 8, 64, 2))
    dy, gate_up = inputs(tokens, size, dtype, device)
    by_column, by_row = factors_of(2 * size, device), factors_of(tokens, device, 1)
    grad = swiglu.swiglu_backward_triton(dy, gate_up, None, None, False, None)
    activation = swiglu.swiglu_triton(gate_up, False, None)
    found = swiglu.swiglu_backward_with_maxima_triton(dy.clone(), gate_up.clone(), by_column, by_row)
    assert torch.equal(found[0], grad) and torch.equal(found[2], activation)
    ours = fp8.quantize_both_triton(found[0], by_column, by_row, found[1])
    for one, other in zip(ours, fp8.quantize_both(grad, by_column, by_row), strict=True):
        same(one, other)
    rows = fp8.quantize_rows(activation)
    same(fp8.transposed(Operand(dtype, found[2]), found[3]), Rows(fp8.transpose(rows.codes), rows.scales))


@pytest.mark.sample(5)
@dtypes
@forms
def test_the_reference_in_place(interleaved, clamp, dtype) -> None:
    dy, gate_up = inputs(4, 6, dtype, "cpu")
    form = {"interleaved": interleaved, "clamp": clamp}
    out, grad = swiglu.swiglu(gate_up, **form), swiglu.swiglu_backward(dy, gate_up, **form)
    activation = dy.clone()
    result = swiglu.swiglu_backward(activation, gate_up, gate_up, activation, **form)
    assert result is gate_up and torch.equal(result, grad) and torch.equal(activation, out)


@forms
def test_autograd_in_float64(interleaved, clamp) -> None:
    _, gate_up = inputs(4, 6, torch.float64, "cpu")
    gate_up += 1e-3  # off the limit, where there is no slope
    function = SwiGLU.apply
    assert torch.autograd.gradcheck(lambda x: function(x, interleaved, clamp), gate_up.requires_grad_())


@pytest.mark.sample(3)
@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_clamped_form_is_that_of_gpt_oss(interleaved, dtype, device) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=4, intermediate_size=9, num_local_experts=1)
    dy, gate_up = (x.to("cpu") for x in inputs(20, 9, dtype, device))
    gate_up[1] = torch.nan
    gate_up.requires_grad_()
    stored = gate_up if interleaved else torch.stack(gate_up.chunk(2, -1), -1).flatten(-2)
    experts = GptOssExperts(config)
    expected = experts._apply_gate(stored)
    expected.backward(dy)

    ours = gate_up.detach().to(device)
    assert Clamp() == (experts.alpha, experts.limit)
    for forward, backward in (
        (reference.swiglu, reference.swiglu_backward),
        (swiglu.swiglu_triton, swiglu.swiglu_backward_triton),
    ):
        out = forward(ours, interleaved, Clamp()).cpu()
        grad = backward(dy.to(device), ours, None, None, interleaved, Clamp()).cpu()
        assert out[1].isnan().all()
        rows = [0, *range(2, 20)]
        at_limit = gate_up.detach().abs() == experts.limit  # torch's derivative of clamp is 1 there, from 2.15 on 0
        assert at_limit.any() and (grad[at_limit] != 0).all()
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(out[rows], expected[rows], rtol=4 * unit, atol=4 * unit)
        grad, other = (x.masked_fill(at_limit, 0)[rows] for x in (grad, gate_up.grad))
        torch.testing.assert_close(grad, other, rtol=8 * unit, atol=8 * unit * 40)


@dtypes
def test_large_values(dtype, device) -> None:
    """Sigmoids that are 0 and 1 to the last bit."""
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 5.0]], dtype=dtype, device=device)
    dy = torch.ones(1, 2, dtype=dtype, device=device)
    assert swiglu.swiglu_triton(gate_up, False, None).tolist() == [[0, 1000]]
    grad = swiglu.swiglu_backward_triton(dy, gate_up, None, None, False, None)
    assert grad.tolist() == [[0, 5, 0, 200]]


@dtypes
def test_no_tokens(dtype, device) -> None:
    gate_up = torch.empty(0, 6, dtype=dtype, device=device)
    out = swiglu.swiglu_triton(gate_up, False, None)
    assert out.shape == (0, 3) and swiglu.swiglu_backward_triton(out, gate_up, None, out, False, None).shape == (0, 6)
