from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rptrain.kernels import reference
from rptrain.kernels.attention import attention, attention_backward, backend

bf16, fp32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "device", "uniform", "head_size", "deterministic", "expected"),
    [
        (bf16, "cpu", True, 128, False, "reference"),
        (fp32, "cuda", True, 128, False, "reference"),
        (torch.float64, "cuda", False, 128, True, "reference"),
        (bf16, "cuda", True, 128, False, "cudnn"),
        (bf16, "cuda", True, 128, True, "flash"),
        (torch.float16, "cuda", False, 64, False, "flash"),
        (bf16, "cuda", True, 256, False, "flash"),
        (bf16, "cuda", True, 264, False, "reference"),
        (bf16, "cuda", True, 36, False, "reference"),
    ],
)
def test_backend(dtype, device, uniform, head_size, deterministic, expected) -> None:
    assert backend(dtype, device, uniform, head_size, deterministic=deterministic) == expected


def test_backend_can_be_forced() -> None:
    assert backend(bf16, "cuda", True, 128, force="cudnn") == "cudnn"
    assert backend(bf16, "cuda", True, 128, force="reference") == "reference"
    for dtype, device, uniform, force in (
        (bf16, "cuda", False, "cudnn"),
        (fp32, "cuda", True, "flash"),
        (bf16, "cpu", True, "flash"),
        (bf16, "cuda", True, "mine"),
    ):
        with pytest.raises(ValueError, match=force):
            backend(dtype, device, uniform, 128, force=force)


def test_the_cpu_takes_the_reference(micro_batch) -> None:
    mb = micro_batch([[3, 2], [5]])
    torch.manual_seed(0)
    q, k, v = torch.randn(10, 4, 6), torch.randn(10, 2, 6), torch.randn(10, 2, 6)
    out, saved = attention(q, k, v, mb)
    expected, lse = reference.attention(q, k, v, mb.positions, 2, 5)
    assert saved.backend == "reference"
    assert torch.equal(out, expected) and torch.equal(saved.lse, lse)
    grads = attention_backward(out, q, k, v, out, saved, mb)
    expected = reference.attention_backward(out, q, k, v, out, lse, mb.positions, 2, 5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(grads, expected, strict=True))


@pytest.mark.parametrize(("force", "documents"), [("flash", [[200, 56], [256]]), ("cudnn", [[256], [256]])])
def test_calls_fit_the_operations(force, documents, micro_batch) -> None:
    """Shapes and arguments only, without a GPU."""
    torch.use_deterministic_algorithms(False)  # fake tensors cannot be filled
    mb = micro_batch(documents)
    with FakeTensorMode():
        mb = replace(mb, cu_seqlens=torch.empty(mb.cu_seqlens.shape, dtype=torch.int32, device="cuda"))
        qkv = torch.empty(512, 8, 64, device="cuda", dtype=bf16)
        q, k, v = qkv.split([4, 2, 2], 1)
        out, saved = attention(q, k, v, mb, force)
        assert saved.backend == force and out.is_contiguous()
        grads = attention_backward(torch.empty_like(out), q, k, v, out, saved, mb)
        assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


CASES = [
    ("flash", [[200, 56], [256]]),
    ("flash", [[256], [256]]),
    ("flash", [[1, 1, 1]]),
    ("flash", [[1, 1, 301, 2]]),
    ("cudnn", [[256], [256]]),
    ("cudnn", [[129]]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize(("force", "documents"), CASES, ids=str)
def test_cuda_against_the_reference(force, documents, heads, kv_heads, size, dtype, micro_batch) -> None:
    mb = micro_batch(documents, "cuda")
    tokens = mb.rows * mb.length
    torch.manual_seed(0)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size, device="cuda", dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    dout = torch.randn(tokens, heads, size, device="cuda", dtype=dtype)
    out, saved = attention(q, k, v, mb, force)
    assert saved.backend == force
    grads = attention_backward(dout, q, k, v, out, saved, mb)

    wide = [x.double() for x in (q, k, v)]
    expected, lse = reference.attention(*wide, mb.positions, mb.rows, mb.length)
    theirs = reference.attention_backward(dout.double(), *wide, expected, lse, mb.positions, mb.rows, mb.length)
    for ours, exact in zip((out, *grads), (expected, *theirs), strict=True):
        assert (ours.double() - exact).abs().max() <= 2e-2 * exact.abs().max() + 1e-5


@pytest.mark.gpu
def test_flash_is_deterministic_when_asked(micro_batch) -> None:
    mb = micro_batch([[3000, 1096]], "cuda")
    torch.manual_seed(0)
    q, dout = (torch.randn(4096, 8, 64, device="cuda", dtype=bf16) for _ in range(2))
    k, v = (torch.randn(4096, 2, 64, device="cuda", dtype=bf16) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    out, saved = attention(q, k, v, mb)
    first = attention_backward(dout, q, k, v, out, saved, mb)
    for _ in range(5):
        again = attention_backward(dout, q, k, v, out, saved, mb)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
