import pytest
import torch
from torch.nn import functional as F

from rptrain.kernels import linear_cross_entropy as lce
from rptrain.kernels.reference import wide

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype):
    torch.manual_seed(0)
    h, w = torch.randn(tokens, hidden).to(dtype), (torch.randn(vocab, hidden) / hidden**0.5).to(dtype)
    labels = torch.randint(vocab, (tokens,))
    return h, w, labels


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(9, 5, 7), (1, 1, 1), (1, 4, 3), (65, 8, 33)])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 33 * 16, 2**28])
def test_loss_and_gradients(tokens, hidden, vocab, chunk_bytes, dtype, monkeypatch) -> None:
    monkeypatch.setattr(lce, "CHUNK_BYTES", chunk_bytes)
    h, w, labels = inputs(tokens, hidden, vocab, dtype)
    if tokens > 1:
        labels[::3] = lce.IGNORED
    grad_w = torch.ones(w.shape, dtype=wide(dtype))
    loss, dh = lce.linear_cross_entropy_backward(h, w, labels, 0.3, grad_w)
    assert loss.shape == () and loss.dtype == wide(dtype) and dh.dtype == dtype
    assert torch.equal(loss, lce.linear_cross_entropy(h, w, labels))

    h64, w64 = (tensor.to(torch.float64, copy=True).requires_grad_() for tensor in (h, w))
    expected = F.cross_entropy(h64 @ w64.T, labels, ignore_index=lce.IGNORED, reduction="sum")
    (0.3 * expected).backward()
    tolerance = TOLERANCES[dtype]
    for ours, theirs in ((loss, expected), (dh, h64.grad), (grad_w - 1, w64.grad)):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_nothing_supervised(dtype) -> None:
    h, w, labels = inputs(6, 4, 5, dtype)
    labels[:] = lce.IGNORED
    grad_w = torch.zeros(w.shape, dtype=wide(dtype))
    loss, dh = lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)
    assert loss == 0 and not dh.any() and not grad_w.any()
    assert lce.linear_cross_entropy(h, w, labels) == 0


def test_large_logits_do_not_overflow() -> None:
    h, w, labels = inputs(6, 4, 5, torch.float32)
    grad_w = torch.zeros_like(w)
    loss, dh = lce.linear_cross_entropy_backward(1000 * h, w, labels, 1.0, grad_w)
    assert all(tensor.isfinite().all() for tensor in (loss, dh, grad_w))


@pytest.mark.parametrize(("vocab", "tokens"), [(151936, 384), (128256, 512), (2**26, 1), (2**30, 1)])
def test_chunks_stay_within_their_bytes(vocab: int, tokens: int) -> None:
    assert lce.chunk_tokens(vocab) == tokens


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_no_value_is_read_on_the_host(dtype) -> None:
    """Meta tensors have none: a branch or a shape that depends on one raises."""
    h, w, labels = (tensor.to("meta") for tensor in inputs(9, 5, 7, dtype))
    grad_w = torch.empty(w.shape, dtype=wide(dtype), device="meta")
    lce.linear_cross_entropy(h, w, labels)
    lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)


@pytest.mark.gpu
def test_cuda_never_waits() -> None:
    h, w, labels = (tensor.cuda() for tensor in inputs(65, 8, 64, torch.bfloat16))
    grad_w = torch.zeros(w.shape, device="cuda")
    lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)
    torch.cuda.set_sync_debug_mode("error")
    try:
        lce.linear_cross_entropy(h, w, labels)
        lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)
    finally:
        torch.cuda.set_sync_debug_mode("default")
