"""Kernels that sum the gradient of a weight leave it out where there is no sum, and all else has the same bits."""

from functools import partial

import pytest
import torch

from rptrain.kernels import flash, rms_norm, rope
from rptrain.kernels import linear_cross_entropy as lce
from rptrain.kernels.batch import Rotation
from rptrain.kernels.reference import dense as reference
from tests.kernels.exact import random


def check(backward, shapes, device):
    """`backward` of the sums, one for each shape, with all of them and without each of them and all."""

    def sums():
        return [torch.ones(shape, device=device) for shape in shapes]

    whole = sums()
    expected = backward(*whole)
    assert all(bool((total != 1).any()) for total in whole)
    for kept in ([], *([i] for i in range(len(shapes)))):
        totals = [total if i in kept else None for i, total in enumerate(sums())]
        for result, same in zip(backward(*totals), expected, strict=True):
            assert torch.equal(result, same)
        assert all(torch.equal(totals[i], whole[i]) for i in kept)


def kernels(*pair):
    return pytest.mark.parametrize("function", pair, ids=["reference", "triton"])


@kernels(reference.rms_norm_backward, partial(rms_norm.rms_norm_backward_triton, dresidual=None))
def test_norm(function, device):
    x, dy, w = random((7, 12), torch.float32, device), random((7, 12), torch.float32, device, 1), torch.ones(12)
    rstd = reference.rms_norm(x, w.to(device), 1e-5)[1]
    check(lambda total: [function(dy, x, w.to(device), rstd, total)], [(12,)], device)


@kernels(reference.qk_norm_rope_backward, rope.qk_norm_rope_backward_triton)
def test_norms_of_queries_and_keys(function, device):
    qkv = random((5, 8 * 6), torch.float32, device)
    angles = random((5, 3), torch.float32, device, 1)
    norm = rope.QKNorm(*(random((6,), torch.float32, device, seed) for seed in (2, 3)), 1e-5)
    rotation = Rotation(angles.cos(), angles.sin())
    rstd = reference.qk_norm_rope(qkv, rotation, 2, 6, norm)[3]
    dq, dk, dv = (random((5, heads, 6), torch.float32, device, 4) for heads in (4, 2, 2))
    check(lambda *sums: [function(dq, dk, dv, qkv.clone(), rotation, norm, rstd, sums)], [(6,), (6,)], device)


def test_sinks_of_the_reference(micro_batch, device):
    given, mb = attention(micro_batch, device)
    layout = (mb.positions, mb.sequences, mb.length, None)
    out, lse = reference.attention(*given[:3], *layout, given[4])
    check(
        lambda total: reference.attention_backward(given[3], *given[:3], out, lse, *layout, given[4], total),
        [(4,)],
        device,
    )


def test_sinks(micro_batch, device):
    given, mb = attention(micro_batch, device)
    out, lse = flash.forward_triton(*given[:3], mb.positions, mb.length, None, given[4])
    layout = (mb.positions, mb.cu_seqlens, mb.length, None)
    check(lambda total: flash.backward_triton(given[3], *given[:3], out, lse, *layout, given[4], total), [(4,)], device)


def attention(micro_batch, device):
    heads = random((16, 4 + 2 + 2, 16), torch.float32, device)
    rest = random((16, 4, 16), torch.float32, device, 1), random((4,), torch.float32, device, 2)
    return [*heads.split([4, 2, 2], 1), *rest], micro_batch([[6, 10]], device)


def test_projection_of_the_loss():
    h, w = random((9, 8), torch.float32, "cpu"), random((33, 8), torch.float32, "cpu", 1)
    labels = torch.arange(9)
    check(lambda total: lce.linear_cross_entropy_backward(h, w, labels, 0.5, total), [(33, 8)], "cpu")
