"""Attention with products summed in float16: errors like those of bfloat16 with float32 sums, for any range."""

import pytest
import torch

from rptrain.kernels import flash
from rptrain.kernels.flash import Passes, Tiles, backward_triton, forward_triton
from rptrain.kernels.half import scaled_heads
from rptrain.kernels.target import nvidia
from tests.cases import grid
from tests.kernels.test_flash import LONGER, SMALL, WIDER, accelerated, bf16, by_reference, fp16, ours, tensors


def errors(given, mb, window, passes, half_sums):
    """Relative errors by result, in the norm of all its values."""
    wide = by_reference([None if x is None else x.double() for x in given], mb, window)
    found = ours(given, mb, window, passes, half_sums)
    return {name: ((found[name].double() - x).norm() / x.norm()).item() for name, x in wide.items()}


def check(given, mb, window=None, passes=SMALL) -> None:
    """At most half as much again as with float32 sums, or 2^-10: a unit in the last place of float16."""
    allowed = errors(given, mb, window, passes, False)
    for name, error in errors(given, mb, window, passes, True).items():
        assert error <= max(1.5 * allowed[name], 2**-10), (name, error, allowed[name])


@pytest.mark.parametrize(
    ("documents", "window", "passes", "dtype"),
    [
        ([[1]], None, SMALL, bf16),
        ([[5, 1, 13], [19]], None, WIDER, fp16),
        ([[20, 7]], 16, LONGER, bf16),
        grid([[30, 7]], 16, LONGER, fp16),
        grid([[5, 1, 19], [25]], None, WIDER, bf16),
    ],
)
def test_documents_and_windows(documents, window, passes, dtype, micro_batch, device) -> None:
    check(tensors(documents, 2, 1, 16, dtype, device, sinks=True), micro_batch(documents, device), window, passes)


@pytest.mark.parametrize("size", [grid(1), grid(24), grid(64), grid(80), 96, grid(128)])
def test_head_sizes_with_the_tiles_of_the_table(size, micro_batch, device) -> None:
    documents = [[40, 30]]  # a block of keys has 32 or 64
    check(tensors(documents, 2, 1, size, bf16, device), micro_batch(documents, device), None, None)


def test_through_descriptors(micro_batch, device) -> None:
    documents = [[5, 1, 19]]
    given = tensors(documents, 2, 1, 16, bf16, device)
    check(given, micro_batch(documents, device), None, accelerated(WIDER, device))


def scaled(given, q=1.0, k=1.0, v=1.0, dout=1.0):
    return [x if x is None else x * factor for x, factor in zip(given, (q, k, v, dout, 1), strict=True)]


@pytest.mark.parametrize(
    "factors",
    [
        grid({"q": 1e4, "k": 1e-4, "v": 1e4, "dout": 1e4}),
        {"q": 1e-20, "k": 1e20, "v": 1e20, "dout": 1e-25},
    ],
)
def test_magnitudes_that_float16_does_not_have(factors, micro_batch, device) -> None:
    given = scaled(tensors([[20]], 2, 1, 16, bf16, device), **factors)
    check(given, micro_batch([[20]], device))


def test_outliers_in_some_tokens_and_channels(micro_batch, device) -> None:
    """Each token keeps its own precision beside tokens with values of 1e4, and small values beside a large channel."""
    documents = [[14, 14]]
    q, k, v, dout, _ = tensors(documents, 2, 1, 16, bf16, device)
    q[:, :, 3] *= 20
    v[7], dout[20] = 1e4 * v[7], 1e4 * dout[20]
    v[14:] *= 1e-2
    given, mb = [q, k, v, dout, None], micro_batch(documents, device)
    check(given, mb)
    wide = by_reference([None if x is None else x.double() for x in given], mb, None)
    found = ours(given, mb, None, SMALL, True)
    for name in ("out", "dv"):  # gradients of scores cancel out in some tokens
        error = (found[name].double() - wide[name]).flatten(1).norm(dim=1)
        assert (error <= 2**-7 * wide[name].flatten(1).norm(dim=1)).all(), name


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize(
    ("which", "value"),
    [
        ("v", float("nan")),
        grid("v", float("inf")),
        *(grid(which, value) for which in ("q", "k", "dout") for value in (float("nan"), float("inf"))),
        *(grid(which, 3e38) for which in ("q", "k", "v", "dout")),
    ],
)
def test_nan_and_infinity_stay(which, value, micro_batch, device) -> None:
    """What is not finite with float32 sums is not finite with float16 sums either; other documents stay as they are."""
    documents = [[16, 16]]
    mb = micro_batch(documents, device)
    given = tensors(documents, 2, 1, 16, bf16, device)
    before = ours(given, mb, None, SMALL, True)
    place = given["qkv".find(which) if which in "qkv" else 3]
    place[20, 0, 5] = value
    full, half = (ours(given, mb, None, SMALL, half_sums) for half_sums in (False, True))
    for name in before:
        assert half[name][~full[name].isfinite()].isfinite().logical_not().all(), name
        x, y = (result[name].T if name == "lse" else result[name] for result in (before, half))
        assert torch.equal(x[:16], y[:16]), name
    assert any(not x.isfinite().all() for x in half.values()) or value == 3e38


def test_equal_bits_every_time_and_into_views(micro_batch, device) -> None:
    documents = [[7, 9]]
    mb = micro_batch(documents, device)
    q, k, v, dout, _ = given = tensors(documents, 4, 2, 16, bf16, device)
    first, again = (ours(given, mb, 9, SMALL, True) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    whole = torch.full((16, 9, 16), float("nan"), dtype=bf16, device=device)
    into = tuple(whole[:, :8].split([4, 2, 2], 1))
    heads = [scaled_heads(x) for x in (q, k, v)]
    heads[0] = heads[0]._replace(values=heads[0].values.repeat(1, 2, 1)[:, :4])  # of a wider buffer
    heads[1] = heads[1]._replace(values=heads[1].values.mT.contiguous().mT)
    layout = mb.positions, mb.cu_seqlens, mb.length, 9
    apart = dout.repeat(1, 1, 2)[:, :, :16]
    backward_triton(apart, *heads, first["out"], first["lse"], *layout, into=into, passes=SMALL)
    for name, place in zip(("dq", "dk", "dv"), into, strict=True):
        assert torch.equal(place, first[name]), name
    assert whole[:, 8].isnan().all()


def test_a_table_for_every_card() -> None:
    for card in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        for size in (36, 64, 128):
            passes = flash.tiles(bf16, size, nvidia(*card), half_sums=True)
            assert max(passes.forward.keys, passes.dq.keys, passes.dkdv.queries) <= 128  # terms of a sum


def test_no_sum_overflows(micro_batch, device) -> None:
    """The largest sums there are: 128 keys that share the probability, and 128 queries that see one key alone."""
    tokens = 130
    ones = torch.full((tokens, 1, 128), 1.99, dtype=bf16, device=device)
    mb, passes = micro_batch([[tokens]], device), Passes(*[Tiles(128, 128, 8, 1)] * 3)
    for k in (ones, torch.cat((ones[:1], -ones[1:]))):
        heads = [scaled_heads(x) for x in (ones, k, ones)]
        out, lse = forward_triton(*heads, mb.positions, mb.length, passes=passes)
        assert torch.allclose(out.float(), ones.float(), rtol=2**-7)
    layout = mb.positions, mb.cu_seqlens, mb.length
    grads = backward_triton(ones, *heads, out, lse, *layout, passes=passes)
    assert all(x.isfinite().all() for x in grads)
    assert torch.allclose(grads[2][0].float(), tokens * ones[0].float(), rtol=2**-7)
