"""The output gate's kernels against the reference, and the reference against autograd."""

import pytest
import torch

from rptrain.kernels import fp8, output_gate
from rptrain.kernels.fp8 import Form, Operand
from rptrain.kernels.reference import dense as reference
from tests.kernels.exact import dtypes, exact, no_worse, random

from .test_fp8 import same

sizes = pytest.mark.parametrize("shape", [(5, 3, 1), (1, 1, 6), (3, 5, 256), (2, 3, 80), (4, 24, 256)])


def inputs(shape, dtype, device):
    """dy, out, and gates as a view of the fused product, which has two key heads."""
    tokens, heads, size = shape
    qkv = 3 * random((tokens, (2 * heads + 4) * size), dtype, device)
    return random((tokens, heads * size), dtype, device, 1), random(shape, dtype, device, 2), qkv


@pytest.mark.sample(8)
@dtypes
@sizes
def test_forward_and_backward(shape, dtype, device) -> None:
    dy, out, qkv = inputs(shape, dtype, device)
    gates = reference.split_gates(qkv, 2, shape[2])
    wide_dy, wide_out, wide_qkv = exact(dy, out, qkv)
    wide_gates = reference.split_gates(wide_qkv, 2, shape[2])
    ours = output_gate.output_gate_triton(out, gates)
    no_worse(ours, reference.output_gate(out, gates), reference.output_gate(wide_out, wide_gates))

    found, theirs = [], []
    for function, place in ((output_gate.output_gate_backward_triton, found), (reference.output_gate_backward, theirs)):
        dqkv, again = qkv.clone(), dy.clone()
        dout = function(again, out, reference.split_gates(dqkv, 2, shape[2]))
        no_worse(again, reference.output_gate(out, gates), reference.output_gate(wide_out, wide_gates))
        place += [dout, dqkv, again]
    wide_dout = reference.output_gate_backward(wide_dy, wide_out, wide_gates)
    no_worse(found[0], theirs[0], wide_dout)
    no_worse(found[1], theirs[1], wide_qkv)  # all but gates as before
    assert torch.equal(found[2], ours)


in_fp8 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.mark.sample(4)
@in_fp8
@sizes
@pytest.mark.parametrize("longest", [16384, 64])
def test_rows_in_fp8(shape, longest, dtype, device, monkeypatch) -> None:
    """Those of the rounded result, of rows that fit into registers and of longer ones."""
    monkeypatch.setattr(output_gate, "LONGEST", longest)
    _, out, qkv = inputs(shape, dtype, device)
    gates = reference.split_gates(qkv, 2, shape[2])
    found = output_gate.output_gate_rows_triton(out, gates)
    expected = fp8.quantize_rows_triton(output_gate.output_gate_triton(out, gates), None)
    assert found.plain is None and found.rows is not None
    same(found.rows, expected)


def test_forms() -> None:
    _, out, qkv = inputs((3, 2, 8), torch.bfloat16, "cpu")
    gates = reference.split_gates(qkv, 2, 8)
    plain = reference.output_gate(out, gates)
    for form in (Form.PLAIN, Form.ROWS, Form.PLAIN | Form.ROWS):
        found = output_gate.output_gate(out, gates, form)
        assert isinstance(found, Operand)
        assert (found.plain is not None) == (Form.PLAIN in form) and (found.rows is not None) == (Form.ROWS in form)
        assert found.plain is None or torch.equal(found.plain, plain)
        assert found.rows is None or torch.equal(found.rows.scales, fp8.quantize_rows(plain).scales)


def test_autograd_in_float64() -> None:
    dy, out, qkv = inputs((3, 2, 6), torch.float64, "cpu")
    gates = reference.split_gates(qkv, 2, 6)
    leaves = out.clone().requires_grad_(), gates.clone().requires_grad_()
    expected = torch.autograd.grad((leaves[0] * leaves[1].sigmoid()).flatten(1), leaves, dy)
    dout = output_gate.output_gate_backward(dy, out, gates)
    for ours, theirs in zip((dout, gates), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_tokens(device) -> None:
    dy, out, qkv = inputs((0, 2, 6), torch.float32, device)
    gates = reference.split_gates(qkv, 2, 6)
    assert output_gate.output_gate_triton(out, gates).shape == (0, 12)
    rows = output_gate.output_gate_rows_triton(out, gates).rows
    assert rows is not None and rows.codes.shape == (0, 12)
    assert output_gate.output_gate_backward_triton(dy, out, gates).shape == (0, 2, 6)
