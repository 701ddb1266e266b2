"""The gated delta rule: the reference against a loop over tokens, and the kernels against the reference."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from rptrain.kernels import delta_rule as ours
from rptrain.kernels.batch import Documents
from rptrain.kernels.reference import delta_rule as reference

from .exact import dtypes

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the norm of an error, of the result's
NAMES = ("q", "k", "v", "decay", "beta")


def inputs(
    tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu", decay: float = 1.0
) -> Inputs:
    """q, k, v, decay and beta of K key heads, H value heads, C columns of keys and V of values."""
    keys, heads, size, columns = sizes
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (normalize(random(tokens, keys, size), dim=-1).to(device, dtype) for _ in range(2))
    v = random(tokens, heads, columns).to(device, dtype)
    g, b = (random(tokens, heads).sigmoid().to(device, wide) for _ in range(2))
    return q, k, v, -g * decay, b


def documents(lengths: Sequence[int], device: str = "cpu", chunk: int = 64) -> Documents:
    """With two empty ones at the end, as in batches of several numbers of documents."""
    cu_seqlens = torch.tensor([0, *lengths, 0, 0], device=device).cumsum(0).int()
    return Documents.of(cu_seqlens, sum(lengths), chunk)


def loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int]) -> Tensor:
    """The rule, token by token."""
    outputs, repeats = [], v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(repeats, 1) for x in (q, k))
    starts = {sum(lengths[:index]) for index in range(len(lengths))}
    state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2])
    for t in range(len(q)):
        state = torch.zeros_like(state) if t in starts else state
        state = state * decay[t].exp()[:, None, None]
        error = v[t] - (state * k[t].unsqueeze(2)).sum(1)
        state = state + k[t].unsqueeze(2) * (beta[t].unsqueeze(1) * error).unsqueeze(1)
        outputs.append((state * q[t].unsqueeze(2)).sum(1) * q.shape[2] ** -0.5)
    return torch.stack(outputs)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_chunks_against_a_loop_over_tokens(chunk) -> None:
    lengths = [5, 64, 1, 70]
    leaves = [x.requires_grad_() for x in inputs(sum(lengths), (2, 4, 12, 10), torch.float64)]
    out = loop(*leaves, lengths)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    values = [x.detach() for x in leaves]
    found, _ = reference.gated_delta_rule(*values, documents(lengths, chunk=chunk), chunk=chunk)
    torch.testing.assert_close(found, out, atol=1e-12, rtol=0)
    if chunk == 64:
        for grad, expected in zip(
            reference.gated_delta_rule_backward(dout, *values, documents(lengths)), grads, strict=True
        ):
            torch.testing.assert_close(grad, expected, atol=1e-12, rtol=0)


SHAPES = [
    ([5, 64, 1, 70], (1, 2, 24, 40)),
    ([130], (2, 2, 16, 16)),
    ([64, 64], (1, 3, 33, 20)),
    ([1, 2, 3], (2, 4, 8, 70)),
    ([100, 29], (1, 1, 128, 128)),
]


@pytest.mark.sample(2, gate=3)
@dtypes
@pytest.mark.parametrize(("lengths", "sizes"), SHAPES)
def test_kernels(lengths, sizes, dtype, device) -> None:
    values, where = inputs(sum(lengths), sizes, dtype, device), documents(lengths, device)
    out, states, kept = ours.forward_triton(*values, where, None, final=True)
    dout = torch.randn(out.shape, device=device).to(dtype)
    grads = ours.backward_triton(dout, *values, kept, where)
    wide = [x.double() for x in values]
    expected = (
        *reference.gated_delta_rule(*wide, where),
        *reference.gated_delta_rule_backward(dout.double(), *wide, where),
    )
    for name, x, y in zip(("out", "states", *NAMES), (out, states, *grads), expected, strict=True):
        assert error(x, y) < LIMITS[dtype], name
    assert [x.dtype for x in (out, *grads)] == [dtype, dtype, dtype, dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("kernels", [False, True])
def test_a_sequence_in_two_parts(kernels, device) -> None:
    """The state behind the first part is the initial one of the second."""
    where = device if kernels else "cpu"
    values = inputs(150, (1, 2, 24, 20), torch.float32, where)

    def run(values: Sequence[Tensor], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        places = documents([len(values[0])], where)
        if kernels:
            return ours.forward_triton(*values, places, initial, final=True)[:2]
        return ours.gated_delta_rule(*values, places, initial=initial, final=True)[:2]

    whole, last = run(values, None)
    first, state = run([x[:81].contiguous() for x in values], None)
    second, behind = run([x[81:].contiguous() for x in values], state)
    assert error(torch.cat((first, second)), whole.double()) < 1e-5 and error(behind[0], last[0].double()) < 1e-5


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.long)])
def test_documents_are_isolated(kernels, device) -> None:
    """A document's outputs and gradients are those that it has alone, to the bit, whatever is in the others."""
    lengths, where = [66, 3, 64], device if kernels else "cpu"
    values = inputs(sum(lengths), (1, 2, 24, 20), torch.float32, where)
    dout = torch.randn(values[2].shape, generator=torch.Generator().manual_seed(1)).to(where)

    def run(values: Sequence[Tensor], dout: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        places = documents(lengths, where)
        if not kernels:
            out, _, kept = ours.gated_delta_rule(*values, places)
            return out, *ours.gated_delta_rule_backward(dout, *values, kept, places)
        out, _, kept = ours.forward_triton(*values, places, None, final=False)
        return out, *ours.backward_triton(dout, *values, kept, places)

    whole = run(values, dout, lengths)
    changed = run(
        [
            torch.where(torch.arange(len(x), device=where).view(-1, *[1] * (x.dim() - 1)) < lengths[0], x * 0.5, x)
            for x in values
        ],
        dout,
        lengths,
    )
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = run([x[part].contiguous() for x in values], dout[part].contiguous(), [length])
        for packed, single in zip(whole, alone, strict=True):
            assert torch.equal(packed[part], single)
        start += length
    first = lengths[0]
    for before, after in zip(whole, changed, strict=True):
        assert torch.equal(before[first:], after[first:]) and not torch.equal(before[:first], after[:first])


def test_equal_keys_stay_exact(device) -> None:
    """The triangular system of equal keys has the largest entries that there are; its solution is small."""
    q, k, v, decay, beta = inputs(128, (1, 1, 16, 16), torch.float32, device)
    values = q, k[:1].expand_as(k).contiguous(), v, decay * 0, torch.ones_like(beta)
    where = documents([128], device)
    out, _, _ = ours.forward_triton(*values, where, None, final=False)
    assert error(out, reference.gated_delta_rule(*(x.double() for x in values), where)[0]) < 1e-5
