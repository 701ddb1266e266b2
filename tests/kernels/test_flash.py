"""The attention kernels against the reference: documents, windows, sinks, head sizes, strides, and equal bits."""

import pytest
import torch
from torch import Tensor

from rptrain.kernels import flash
from rptrain.kernels.flash import Passes, Tiles, backward_triton, forward_triton
from rptrain.kernels.half import scaled_heads
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.target import nvidia, read
from tests.kernels.exact import close, random

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
SMALL = Passes(*[Tiles(16, 16, 4, 1)] * 3)
WIDER = Passes(Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2), Tiles(32, 16, 4, 2))
LONGER = Passes(Tiles(16, 32, 4, 2), Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2))


def tensors(documents, heads, kv_heads, size, dtype, device, sinks=False) -> list[Tensor | None]:
    """q, k and v as views of one product, dout, sinks."""
    tokens = sum(map(sum, documents))
    qkv = random((tokens, heads + 2 * kv_heads, size), dtype, device)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    return [
        q,
        k,
        v,
        random((tokens, heads, size), dtype, device, 1),
        random((heads,), dtype, device) if sinks else None,
    ]


def ours(given, mb, window, passes, half_sums=False, scale=None):
    q, k, v, dout, sinks = given
    if half_sums:
        q, k, v = map(scaled_heads, (q, k, v))
    out, lse = forward_triton(q, k, v, mb.positions, mb.length, window, sinks, passes, scale=scale)
    dsinks = None if sinks is None else torch.ones(sinks.shape, device=dout.device)
    layout = (mb.positions, mb.cu_seqlens, mb.length, window)
    grads = backward_triton(dout, q, k, v, out, lse, *layout, sinks, dsinks, passes=passes, scale=scale)
    results = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return results if dsinks is None else results | {"dsinks": dsinks}


def by_reference(given, mb, window, scale=None):
    q, k, v, dout, sinks = given
    layout = (mb.positions, mb.sequences, mb.length, window)
    out, lse = reference.attention(q, k, v, *layout, sinks, scale=scale)
    dsinks = None if sinks is None else torch.ones(sinks.shape, dtype=lse.dtype, device=q.device)
    grads = reference.attention_backward(dout, q, k, v, out, lse, *layout, sinks, dsinks, scale=scale)
    results = {"out": out, "lse": lse.T} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return results if dsinks is None else results | {"dsinks": dsinks}


def check(given, mb, window, passes, scale=None) -> None:
    """In float32 within 1e-5. Else the products' operands are rounded, the probabilities too: a unit in the last place
    of the largest value, and on the whole three times the error of the reference, which rounds only results.
    """
    wide = by_reference([None if x is None else x.double() for x in given], mb, window, scale)
    theirs = by_reference(given, mb, window, scale)
    for name, result in ours(given, mb, window, passes, scale=scale).items():
        if given[0].dtype == fp32 or name == "lse":
            close(result, wide[name])
            continue
        error = (result.double() - wide[name]).abs()
        unit = torch.finfo(given[0].dtype).eps * max(wide[name].abs().max().item(), 1)
        allowed = (theirs[name].double() - wide[name]).abs()
        assert error.max() <= max(unit, 2 * allowed.max().item()), (name, error.max(), allowed.max())
        assert error.mean() <= 3 * allowed.mean() + unit / 100, (name, error.mean(), allowed.mean())


def accelerated(passes: Passes, device: str) -> Passes:
    if device == "cuda" and not read().tma:
        pytest.skip("this GPU has no tensor memory accelerator")
    return passes._replace(tma=True)


LAYOUTS = [
    ([[1]], None, SMALL),
    ([[1, 1, 1]], None, SMALL),
    ([[33]], None, WIDER),
    ([[16, 16]], None, SMALL),
    ([[5, 1, 19], [25]], None, LONGER),
    ([[40]], 1, SMALL),
    ([[3, 38]], 7, WIDER),
    ([[34, 7]], 16, LONGER),
    ([[9, 2], [11]], 100, SMALL),
]


@pytest.mark.parametrize(("documents", "window", "passes"), LAYOUTS)
def test_documents_and_windows(documents, window, passes, micro_batch, device) -> None:
    check(tensors(documents, 2, 1, 16, fp32, device), micro_batch(documents, device), window, passes)


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize(("documents", "window", "passes"), [LAYOUTS[0], LAYOUTS[4], LAYOUTS[6]])
def test_through_descriptors(documents, window, passes, size, micro_batch, device) -> None:
    given = tensors(documents, 4, 2, size, bf16, device)
    check(given, micro_batch(documents, device), window, accelerated(passes, device))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("documents", "window"), [([[1]], None), ([[6, 14], [20]], None), ([[35]], 5)])
def test_sinks(documents, window, micro_batch, device) -> None:
    given = tensors(documents, 3, 1, 8, fp32, device, sinks=True)
    check(given, micro_batch(documents, device), window, SMALL)


@pytest.mark.parametrize("window", [None, 5])
def test_the_scale_of_scores(window, micro_batch, device) -> None:
    documents = [[6, 14], [20]]
    given, mb = tensors(documents, 2, 1, 16, fp32, device, sinks=window is not None), micro_batch(documents, device)
    check(given, mb, window, SMALL, scale=0.7)
    assert not torch.equal(ours(given, mb, window, SMALL, scale=0.7)["out"], ours(given, mb, window, SMALL)["out"])


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, fp32), (24, bf16), (64, bf16), (64, fp32), (80, fp16), (96, bf16), (128, fp32), (256, bf16), (512, bf16)],
)
def test_head_sizes_with_the_tiles_of_the_table(size, dtype, micro_batch, device) -> None:
    documents = [[11, 27]]
    given = tensors(documents, 2, 1, size, dtype, device, sinks=True)
    check(given, micro_batch(documents, device), None, None)


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (8, 2), (12, 2), (16, 2)])
def test_heads(heads, kv_heads, micro_batch, device) -> None:
    check(tensors([[18]], heads, kv_heads, 16, bf16, device), micro_batch([[18]], device), None, SMALL)


def test_scores_far_from_zero(micro_batch, device) -> None:
    """Neither overflow nor a sum of zeros where all scores, or the sink, are far away."""
    q, k, v, dout, sinks = tensors([[20]], 2, 1, 16, fp32, device, sinks=True)
    mb = micro_batch([[20]], device)
    low = (-40 * torch.ones_like(q), 20 + k)
    for scored in ((40 * q, 5 * k, sinks - 300), (40 * q, 5 * k, sinks + 300), (*low, None)):
        given = [*scored[:2], v, dout, scored[2]]
        theirs = by_reference([None if x is None else x.double() for x in given], mb, None)
        for name, result in ours(given, mb, None, SMALL).items():
            error = (result.double() - theirs[name]).abs().max()
            assert error <= 1e-3 * max(theirs[name].abs().max().item(), 1), (name, error)


@pytest.mark.parametrize("window", [None, 6])
def test_documents_do_not_touch_one_another(window, micro_batch, device) -> None:
    documents = [[7, 12, 20], [39]]
    mb = micro_batch(documents, device)
    given = tensors(documents, 2, 1, 16, bf16, device)
    before = ours(given, mb, window, SMALL)
    changed = [None if x is None else x.clone() for x in given]
    for x in changed[:4]:
        x[7:19] = 30 * random((12, *x.shape[1:]), bf16, device, 9)
    after = ours(changed, mb, window, SMALL)
    for name in before:
        x, y = (result[name].T if name == "lse" else result[name] for result in (before, after))
        assert not torch.equal(x[7:19], y[7:19]), name
        assert torch.equal(x[:7], y[:7]) and torch.equal(x[19:], y[19:]), name


def test_equal_bits_every_time_and_into_views(micro_batch, device) -> None:
    documents = [[13, 7], [20]]
    mb = micro_batch(documents, device)
    q, k, v, dout, sinks = given = tensors(documents, 4, 2, 16, bf16, device, sinks=True)
    first, again = (ours(given, mb, 9, SMALL) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    whole = torch.full((40, 9, 16), float("nan"), dtype=bf16, device=device)
    into = tuple(whole[:, :8].split([4, 2, 2], 1))
    backward_triton(
        dout, q, k, v, first["out"], first["lse"], mb.positions, mb.cu_seqlens, mb.length, 9, sinks,
        torch.ones(4, device=device), into, SMALL,
    )  # fmt: skip
    for name, place in zip(("dq", "dk", "dv"), into, strict=True):
        assert torch.equal(place, first[name]), name
    assert whole[:, 8].isnan().all()


@pytest.mark.parametrize("tma", [False, True])
def test_any_strides(tma, micro_batch, device) -> None:
    """Layouts that the kernels cannot read are copied: heads apart, values apart, an odd address."""
    mb = micro_batch([[19]], device)
    passes = accelerated(SMALL, device) if tma else SMALL
    given = tensors([[19]], 2, 2, 16, bf16, device)
    q, k, v, dout, _ = given
    odd = torch.empty(19 * 2 * 16 + 1, dtype=bf16, device=device)[1:].view(19, 2, 16).copy_(v)
    apart = [q.transpose(0, 1).contiguous().transpose(0, 1), k.mT.contiguous().mT, odd, dout.repeat(1, 1, 2)[:, :, :16]]
    expected, found = ours(given, mb, None, passes), ours([*apart, None], mb, None, passes)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_padded_ends_of_documents(micro_batch, device) -> None:
    """A list of documents may be filled up with empty ones, so that its length is fixed."""
    documents = [[5, 14]]
    mb = micro_batch(documents, device)
    q, k, v, dout, _ = tensors(documents, 2, 1, 16, fp32, device)
    out, lse = forward_triton(q, k, v, mb.positions, mb.length, passes=SMALL)
    padded = torch.cat((mb.cu_seqlens, mb.cu_seqlens[-1:].repeat(4)))
    one, other = (
        backward_triton(dout, q, k, v, out, lse, mb.positions, ends, mb.length, passes=SMALL)
        for ends in (mb.cu_seqlens, padded)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [bf16, fp32])
@pytest.mark.parametrize("size", [36, 64, 80, 128, 256, 512])
def test_a_table_for_every_card(size, dtype) -> None:
    cards = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
    found = {flash.tiles(dtype, size, nvidia(*card)) for card in cards}
    assert any(passes.tma for passes in found) == (dtype == bf16 and size != 36)
