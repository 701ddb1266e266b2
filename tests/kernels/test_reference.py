"""Forward and every gradient against autograd: tight in float64, within rounding in the narrower types."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels.batch import Rotation
from rptrain.kernels.reference import dense as ops

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype, factor: float = 1) -> None:
    """Within the dtype's tolerance of the reference's largest value; fails on NaN."""
    error = (ours.double() - theirs.double()).abs().max()
    assert error <= factor * TOLERANCES[dtype] * max(theirs.abs().max().item(), 1), error


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.float64, copy=True).requires_grad_() for tensor in tensors]


@pytest.mark.sample(6)
@dtypes
@pytest.mark.parametrize("shape", [(7, 5), (1, 1), (3, 4, 6), (257, 33)])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(zero_centered: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    dy = random(*shape, dtype=dtype, seed=2)
    grad_w = torch.ones(shape[-1], dtype=ops.wide(dtype))
    y, rstd = ops.rms_norm(x, w, 1e-3, zero_centered=zero_centered)
    dx = ops.rms_norm_backward(dy, x, w, rstd, grad_w, zero_centered=zero_centered)
    assert (y.dtype, dx.dtype, rstd.dtype, rstd.shape) == (dtype, dtype, ops.wide(dtype), x.shape[:-1])

    x64, w64 = leaves(x, w)
    expected = F.rms_norm(x64, shape[-1:], w64 + zero_centered, 1e-3)
    expected.backward(dy.double())
    close(y, expected, dtype)
    close(dx, x64.grad, dtype)
    close(grad_w - 1, w64.grad, dtype)


@pytest.mark.sample(6)
@dtypes
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), [(5, 4, 2, 6), (1, 1, 1, 2), (33, 3, 1, 8)])
def test_rope(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    q, k = random(tokens, heads, size, dtype=dtype), random(tokens, kv_heads, size, dtype=dtype, seed=1)
    angles = random(tokens, size // 2, dtype=ops.wide(dtype), seed=2)
    rotation = Rotation(angles.cos(), angles.sin())

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        twice_cos, twice_sin = (torch.cat((t, t), -1)[:, None].double() for t in rotation[:2])
        return x * twice_cos + torch.cat((-second, first), -1) * twice_sin

    wide = leaves(q, k)
    for ours, x in zip(ops.rope(q, k, rotation), wide, strict=True):
        close(ours, rotated(x), dtype)
        rotated(x).backward(ours.double())
    ours = ops.rope_backward(*ops.rope(q, k, rotation), rotation)
    for grad, x in zip(ours, wide, strict=True):
        assert grad.dtype == dtype
        close(grad, x.grad, dtype)


@pytest.mark.sample(6)
@dtypes
@pytest.mark.parametrize("shape", [(5, 6), (1, 2), (65, 34)])
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up, dy = 3 * random(*shape, dtype=dtype), random(shape[0], shape[1] // 2, dtype=dtype, seed=1)
    (x64,) = leaves(gate_up)
    gate, up = x64.chunk(2, -1)
    expected = F.silu(gate) * up
    expected.backward(dy.double())
    close(ops.swiglu(gate_up), expected, dtype)
    close(ops.swiglu_backward(dy, gate_up), x64.grad, dtype)


LAYOUTS = [
    [[1]],
    [[7]],
    [[5, 1, 3], [2, 7, 0]],
    [[9], [9]],
    [[1, 1, 1, 6], [4, 5], [9]],
]


@pytest.mark.sample(12)
@dtypes
@pytest.mark.parametrize("documents", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 6), (3, 1, 4), (2, 2, 1)])
def test_attention(documents, heads, kv_heads, size, dtype, micro_batch, monkeypatch) -> None:
    monkeypatch.setattr(ops, "QUERIES", 4)
    documents = [[length for length in row if length] for row in documents]
    mb = micro_batch(documents)
    tokens = mb.sequences * mb.length
    q, do = (random(tokens, heads, size, dtype=dtype, seed=seed) for seed in (0, 1))
    k, v = (random(tokens, kv_heads, size, dtype=dtype, seed=seed) for seed in (2, 3))
    # As in a block: views of a wider product.
    q, k, v = torch.cat((q, k, v), 1).split([heads, kv_heads, kv_heads], 1)
    layout = (mb.positions, mb.sequences, mb.length)
    out, lse = ops.attention(q, k, v, *layout)
    grads = ops.attention_backward(do, q, k, v, out, lse, *layout)
    assert (out.dtype, lse.dtype, lse.shape) == (dtype, ops.wide(dtype), (tokens, heads))
    assert all(grad.dtype == dtype and grad.shape == x.shape for grad, x in zip(grads, (q, k, v), strict=True))

    wide = leaves(q, k, v)
    lengths = [length for row in documents for length in row]
    pieces = zip(*(x.transpose(0, 1).split(lengths, 1) for x in wide), strict=True)
    expected = [F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True) for each in pieces]
    expected = torch.cat(expected, 1).transpose(0, 1)
    expected.backward(do.double())
    close(out, expected, dtype)
    for ours, theirs in zip(grads, wide, strict=True):
        close(ours, theirs.grad, dtype, factor=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_do_not_touch_one_another(dtype, micro_batch, monkeypatch) -> None:
    monkeypatch.setattr(ops, "QUERIES", 4)
    mb = micro_batch([[5, 6], [11]])
    layout = (mb.positions, mb.sequences, mb.length)
    tensors = [random(22, heads, 8, dtype=dtype, seed=heads) for heads in (4, 2, 2, 4)]
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[:5] = 100 * random(5, *tensor.shape[1:], dtype=dtype, seed=9)

    def results(q, k, v, do):
        out, lse = ops.attention(q, k, v, *layout)
        return out, lse, *ops.attention_backward(do, q, k, v, out, lse, *layout)

    for before, after in zip(results(*tensors), results(*changed), strict=True):
        assert not torch.equal(before[:5], after[:5])
        assert torch.equal(before[5:], after[5:])


def test_chunks_of_queries_do_not_change_attention(micro_batch, monkeypatch) -> None:
    mb = micro_batch([[300, 212]])
    q, k, v = (random(512, heads, 8, dtype=torch.float64, seed=heads) for heads in (2, 1, 1))
    whole, _ = ops.attention(q, k, v, mb.positions, 1, 512)
    monkeypatch.setattr(ops, "QUERIES", 512)
    torch.testing.assert_close(whole, ops.attention(q, k, v, mb.positions, 1, 512)[0], rtol=1e-13, atol=1e-13)
