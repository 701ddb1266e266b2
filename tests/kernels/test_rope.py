"""The rotation's kernels, with and without norms of queries and keys, against the reference and autograd."""

import pytest
import torch

from rptrain.kernels import rope
from rptrain.kernels.batch import Rotation
from rptrain.kernels.half import scaled_heads
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.rope import QKNorm
from tests.kernels.exact import close, dtypes, exact, no_worse, random

from .autograd import QKNormRope

# tokens, H, K, C: tiles that are whole, cut, several for the heads of one token, and several a program of backward
SHAPES = [(1, 1, 1, 2), (7, 3, 1, 32), (3, 20, 5, 256), (5, 4, 2, 256), (2, 12, 4, 80), (9, 6, 6, 10), (3, 17, 9, 6)]
# the same and R: some of the columns rotated, or none
SHAPES += [
    (7, 3, 1, 32, 8),
    (3, 20, 5, 128, 64),
    (2, 12, 4, 80, 2),
    (9, 6, 6, 10, 8),
    (5, 4, 2, 12, 0),
    (5, 6, 1, 256, 64),
]
shapes = pytest.mark.parametrize("shape", SHAPES)
# the norm of each head, of all heads, or of each head with factors 1 + weight; the latter also with gates
norms = pytest.mark.parametrize("norm", [False, True, "whole", "zero-centered", "gated"])
EPS = 1e-3


class Inputs:
    """Tensors of a case; `exact` are the same in float64."""

    def __init__(self, shape, norm, dtype, device, factor=False):
        tokens, heads, kv_heads, self.size, *rotated = shape
        size, self.kv_heads, self.gated = self.size, kv_heads, norm == "gated"
        self.qkv = random((tokens, ((1 + self.gated) * heads + 2 * kv_heads) * size), dtype, device)
        angles = random((tokens, (rotated or [size])[0] // 2), torch.float32, device, 1)
        self.rotation = Rotation(1.25 * angles.cos(), 1.25 * angles.sin())  # with a factor, as YaRN has one
        if not angles.numel() and tokens:
            self.rotation = None
        elif factor:
            self.rotation = self.rotation._replace(query_factor=1.5 + random((tokens,), torch.float32, device, 6))
        sizes = (heads * size, kv_heads * size) if norm == "whole" else (size, size)
        weights = (random((width,), dtype, device, seed) for width, seed in zip(sizes, (2, 3), strict=True))
        self.norm = QKNorm(*weights, EPS, norm == "whole", norm in ("zero-centered", "gated")) if norm else None
        # gradients as attention may return them: heads before tokens, a wider buffer
        self.dq = random((heads, tokens, size), dtype, device, 4).transpose(0, 1)
        self.dk, self.dv = random((tokens, 2 * kv_heads, size), dtype, device, 5).split(kv_heads, 1)

    def exact(self) -> "Inputs":
        wide = object.__new__(Inputs)
        wide.kv_heads, wide.size, wide.gated = self.kv_heads, self.size, self.gated
        for name in ("qkv", "dq", "dk", "dv"):
            setattr(wide, name, getattr(self, name).double())
        tables = [table if table is None else table.double() for table in self.rotation or ()]
        wide.rotation = self.rotation and Rotation(*tables)
        wide.norm = self.norm and QKNorm(*exact(*self.norm[:2]), *self.norm[2:])
        return wide

    def forward(self, function):
        return function(self.qkv.clone(), *self.form, gated=self.gated)

    @property
    def form(self):
        return self.rotation, self.kv_heads, self.size, self.norm

    def gates(self, qkv):
        """Those of the product, none without."""
        return reference.split_gates(qkv, self.kv_heads, self.size) if self.gated else qkv[:, :0]

    def backward(self, function, rstd):
        """dqkv and the weights' gradients."""
        grads = tuple(torch.ones_like(w, dtype=self.rstd_type) for w in self.norm[:2]) if self.norm else None
        dqkv = self.qkv.clone() if self.norm else torch.full_like(self.qkv, torch.nan)
        result = function(self.dq, self.dk, self.dv, dqkv, self.rotation, self.norm, rstd, grads, gated=self.gated)
        assert result is dqkv and torch.equal(self.gates(dqkv), self.gates(self.qkv))
        return (dqkv, *(grad - 1 for grad in grads or ()))

    @property
    def rstd_type(self):
        return reference.wide(self.qkv.dtype)


@pytest.mark.sample(12)
@dtypes
@shapes
@norms
def test_forward(shape, norm, dtype, device) -> None:
    case = Inputs(shape, norm, dtype, device)
    qkv = case.qkv.clone()
    *ours, rstd = rope.qk_norm_rope_triton(qkv, *case.form, gated=case.gated)
    *unfused, _ = case.forward(reference.qk_norm_rope)
    *theirs, wide_rstd = case.exact().forward(reference.qk_norm_rope)
    for x, same, wide in zip(ours, unfused, theirs, strict=True):
        no_worse(x, same, wide)
    inside = [x.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for x in ours]
    assert inside == [not norm, not norm, True]
    if norm:
        close(rstd, wide_rstd)
        assert torch.equal(qkv, case.qkv)
        assert norm == "whole" or (ours[0].is_contiguous() and ours[1].is_contiguous())
    else:
        assert rstd is None


@pytest.mark.sample(6)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (7, 3, 1, 32), (2, 12, 4, 80, 40), (9, 6, 6, 10), (3, 17, 9, 6, 0)])
@norms
def test_heads_in_float16_are_those_of_the_rotated_values(shape, norm, dtype, device) -> None:
    """The same bits as when rotated values are scaled afterwards, in the same memory; q and k before norms stay.

    The scale of a row that is not finite may be another.
    """
    case = Inputs(shape, norm, dtype, device)
    case.qkv[0, 0], case.qkv[-1, -1] = float("nan"), float("inf")
    case.qkv[-1, : shape[3]] *= 1e-30
    *plain, rstd = case.forward(rope.qk_norm_rope_triton)
    qkv = case.qkv.clone()
    *heads, again = rope.qk_norm_rope_triton(qkv, *case.form, half_sums=True, gated=case.gated)
    for x, found in zip(plain, heads, strict=True):
        expected = scaled_heads(x)
        assert found.dtype == dtype and found.values.dtype == torch.float16
        rows = x.isfinite().all(-1)
        assert torch.equal(found.values[rows], expected.values[rows])
        assert torch.equal(found.scales.T[rows], expected.scales.T[rows]) and found.scales.isfinite().all()
        assert torch.equal(found.values.isfinite(), x.isfinite())
    inside = [x.values.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for x in heads]
    assert inside == [not norm, not norm, True]
    if norm:
        before = ((1 + case.gated) * shape[1] + shape[2]) * shape[3]
        assert torch.equal(rstd, again) or rstd.isnan().any()
        assert torch.equal(qkv[:, :before].view(torch.int16), case.qkv[:, :before].view(torch.int16))


@pytest.mark.sample(5, gate=10)
@dtypes
@shapes
@norms
def test_backward(shape, norm, dtype, device, monkeypatch) -> None:
    monkeypatch.setattr(rope, "programs", lambda device, each: 4)  # few, so that they take several tiles each
    case = Inputs(shape, norm, dtype, device)
    rstd, wide_rstd = (x.forward(reference.qk_norm_rope)[3] for x in (case, case.exact()))
    ours = case.backward(rope.qk_norm_rope_backward_triton, rstd)
    unfused = case.backward(reference.qk_norm_rope_backward, rstd)
    theirs = case.exact().backward(reference.qk_norm_rope_backward, wide_rstd)
    no_worse(ours[0], unfused[0], theirs[0])
    for grad, rounded, expected in zip(ours[1:], unfused[1:], theirs[1:], strict=True):
        if norm == "whole":  # it is made from gradients of normed values in the type of the inputs
            no_worse(grad.to(dtype), rounded.to(dtype), expected)
        else:
            close(grad, expected)
    again = case.backward(rope.qk_norm_rope_backward_triton, rstd)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.sample(3)
@dtypes
@pytest.mark.parametrize("shape", [(7, 3, 1, 32), (3, 20, 5, 256), (9, 6, 6, 10, 8)])
@norms
def test_a_factor_of_whole_queries(shape, norm, dtype, device) -> None:
    case, plain = (Inputs(shape, norm, dtype, device, factor) for factor in (True, False))
    *ours, rstd = case.forward(rope.qk_norm_rope_triton)
    *unfused, _ = case.forward(reference.qk_norm_rope)
    *theirs, wide_rstd = case.exact().forward(reference.qk_norm_rope)
    *without, _ = plain.exact().forward(reference.qk_norm_rope)
    for x, same, wide in zip(ours, unfused, theirs, strict=True):
        no_worse(x, same, wide)
    torch.testing.assert_close(theirs[0], without[0] * case.rotation.query_factor.double()[:, None, None])
    assert all(torch.equal(x, same) for x, same in zip(theirs[1:], without[1:], strict=True))
    found = case.backward(rope.qk_norm_rope_backward_triton, rstd)
    expected = case.exact().backward(reference.qk_norm_rope_backward, wide_rstd)
    no_worse(found[0], case.backward(reference.qk_norm_rope_backward, rstd)[0], expected[0])


@pytest.mark.parametrize("function", [rope.qk_norm_rope_triton, reference.qk_norm_rope])
def test_a_zero_centered_norm_is_rounded_once(function, device) -> None:
    """Nearly all values are those of float64, rounded; with two roundings a quarter would be others."""
    case = Inputs((40, 4, 2, 32, 0), "gated", torch.bfloat16, device)
    found, wide = case.forward(function), case.exact().forward(reference.qk_norm_rope)
    for ours, theirs in zip(found[:2], wide[:2], strict=True):
        assert (ours != theirs.to(ours.dtype)).double().mean() < 0.01


@pytest.mark.parametrize("norm", [False, True, "gated"])
def test_values_that_are_in_place_are_not_copied(norm, device, monkeypatch) -> None:
    case = Inputs((5, 4, 2, 256), norm, torch.float32, device)
    rstd = case.forward(reference.qk_norm_rope)[3]
    expected, *expected_grads = case.backward(rope.qk_norm_rope_backward_triton, rstd)
    kernel, grids = rope._backward, []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    def in_place(dq, dk, dv, dqkv, *rest, gated):
        place = reference.split_heads(dqkv, case.kv_heads, dv.shape[2])[2]
        return rope.qk_norm_rope_backward_triton(dq, dk, place.copy_(dv), dqkv, *rest, gated=gated)

    def elsewhere(dq, dk, dv, dqkv, *rest, gated):
        place = reference.split_heads(torch.empty_like(dqkv), case.kv_heads, dv.shape[2])[2]
        return rope.qk_norm_rope_backward_triton(dq, dk, place.copy_(dv), dqkv, *rest, gated=gated)

    monkeypatch.setattr(rope, "_backward", Recorder())
    for function in (in_place, elsewhere):
        dqkv, *grads = case.backward(function, rstd)
        assert torch.equal(dqkv, expected)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))
    (without,), (copying,) = grids
    tile = rope._backward_sizes(4, 2, 256, norm, 128)[0]["VALUES"]
    assert copying - without == -(-5 // tile)


@pytest.mark.parametrize("norm", [False, True, "whole"])
def test_autograd_in_float64(norm) -> None:
    case = Inputs((5, 4, 2, 6), norm, torch.float64, "cpu")
    weights = case.norm[:2] if case.norm else (None, None)
    inputs = [x.requires_grad_() for x in (case.qkv, *(w for w in weights if w is not None))]

    def ours(qkv, q_weight=None, k_weight=None):
        cos, sin = case.rotation.cos.double(), case.rotation.sin.double()
        return QKNormRope.apply(qkv, cos, sin, case.kv_heads, case.size, q_weight, k_weight, EPS)

    assert torch.autograd.gradcheck(ours, inputs)


@norms
def test_the_reference_is_the_norm_and_the_rotation(norm) -> None:
    case = Inputs((5, 4, 2, 6), norm, torch.float64, "cpu")
    heads = case.qkv.unflatten(1, (-1, 6))
    q, (k, v) = heads[:, :-4], heads[:, -4:].split(2, 1)
    if norm == "gated":
        q = q[:, ::2]
    if case.norm:
        shapes = ((4, 6), (2, 6)) if norm == "whole" else ((6,), (6,))
        q, k = (
            torch.nn.functional.rms_norm(x, shape, weight.view(shape) + case.norm.zero_centered, EPS)
            for x, shape, weight in zip((q, k), shapes, case.norm[:2], strict=True)
        )
    expected = (*reference.rope(q, k, case.rotation), v)
    for ours, theirs in zip(case.forward(rope.qk_norm_rope)[:3], expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@norms
def test_no_tokens(norm, device) -> None:
    case = Inputs((0, 4, 2, 6), norm, torch.float32, device)
    q, k, v, rstd = case.forward(rope.qk_norm_rope_triton)
    assert (q.shape, k.shape, v.shape) == ((0, 4, 6), (0, 2, 6), (0, 2, 6))
    dqkv, *grads = case.backward(rope.qk_norm_rope_backward_triton, rstd)
    assert dqkv.shape == case.qkv.shape and not any(grad.any() for grad in grads)
