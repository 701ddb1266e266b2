from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rptrain.kernels import flash
from rptrain.kernels.attention import attention, attention_backward, backend
from rptrain.kernels.reference import dense as reference
from rptrain.kernels.target import amd, nvidia

from .autograd import Attention

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def triton(monkeypatch) -> None:
    """As if Triton were there: nothing is launched."""
    monkeypatch.setattr(flash, "HAS_TRITON", True)


@pytest.mark.parametrize(
    ("dtype", "device", "uniform", "head_size", "deterministic", "expected"),
    [
        (bf16, "cpu", True, 128, False, "reference"),
        (fp32, "cuda", True, 128, False, "triton"),
        (torch.float64, "cuda", False, 128, True, "reference"),
        (bf16, "cuda", True, 128, False, "cudnn"),
        (bf16, "cuda", True, 128, True, "triton"),
        (fp16, "cuda", False, 64, False, "triton"),
        (bf16, "cuda", True, 256, False, "triton"),
        (bf16, "cuda", True, 512, False, "triton"),
        (bf16, "cuda", True, 520, False, "reference"),
        (bf16, "cuda", True, 36, False, "triton"),
    ],
)
def test_backend(dtype, device, uniform, head_size, deterministic, expected, triton) -> None:
    assert backend(dtype, device, uniform, head_size, deterministic=deterministic) == expected


def test_backend_of_windows_and_sinks(triton) -> None:
    assert backend(bf16, "cuda", True, 128, plain=False, deterministic=False) == "triton"
    assert backend(bf16, "cpu", True, 128, plain=False) == "reference"
    with pytest.raises(ValueError, match="a window or sinks"):
        backend(bf16, "cuda", True, 128, plain=False, force="flash")


@pytest.mark.parametrize(
    ("capability", "uniform", "deterministic", "expected"),
    [
        ((9, 0), True, True, "hybrid"),
        ((10, 0), True, True, "hybrid"),
        ((9, 0), False, True, "triton"),
        ((9, 0), True, False, "cudnn"),
        ((12, 0), True, True, "triton"),
        ((8, 9), True, True, "triton"),
    ],
)
def test_backend_by_card(capability, uniform, deterministic, expected, triton) -> None:
    options = {"deterministic": deterministic, "target": nvidia(*capability)}
    assert backend(bf16, "cuda", uniform, 128, **options) == expected
    assert backend(fp32, "cuda", uniform, 128, **options) == "triton"
    assert backend(bf16, "cuda", True, 128, plain=False, **options) == "triton"


def test_cudnn_is_of_nvidia(triton) -> None:
    assert backend(bf16, "cuda", True, 128, deterministic=False, target=amd("gfx942")) == "triton"


def test_backend_without_triton(monkeypatch) -> None:
    monkeypatch.setattr(flash, "HAS_TRITON", False)
    assert backend(bf16, "cuda", True, 128, target=nvidia(9, 0)) == "flash"
    assert backend(bf16, "cuda", True, 128, plain=False) == "reference"
    assert backend(fp32, "cuda", True, 128) == "reference"


def test_backend_can_be_forced(triton) -> None:
    for name in ("cudnn", "hybrid", "flash", "triton", "reference"):
        assert backend(bf16, "cuda", True, 128, force=name) == name
    for dtype, device, uniform, force in (
        (bf16, "cuda", False, "cudnn"),
        (bf16, "cuda", False, "hybrid"),
        (fp32, "cuda", True, "flash"),
        (bf16, "cpu", True, "flash"),
        (bf16, "cpu", True, "triton"),
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


def test_gradients_into_a_wider_tensor(micro_batch) -> None:
    mb = micro_batch([[4, 2]])
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    out, saved = attention(q, k, v, mb)
    whole = torch.empty(6, 8, 8)
    into = tuple(whole.split([4, 2, 2], 1))
    found = attention_backward(out, q, k, v, out, saved, mb, into=into)
    assert all(a is b for a, b in zip(found, into, strict=True))
    assert torch.equal(whole, torch.cat(attention_backward(out, q, k, v, out, saved, mb), 1))


@pytest.mark.parametrize("window", [None, 3])
def test_windows_and_sinks_as_in_gpt_oss(window, micro_batch) -> None:
    """Against transformers' eager attention, each document by itself, with autograd."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    lengths, heads, kv_heads, size = [7, 2], 4, 2, 8
    mb = micro_batch([lengths])
    torch.manual_seed(0)
    shapes = [(9, heads, size), (9, kv_heads, size), (9, kv_heads, size), (heads,)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in given]
    out = Attention.apply(*given, mb, window)

    q, k, v, sinks = theirs
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, sinks=sinks, training=False)
    pieces = []
    for piece in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        index = torch.arange(len(piece[0]))
        distance = index[:, None] - index
        hidden = (distance < 0) | (distance >= (window or len(index)))
        mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, torch.finfo(torch.float64).min)
        by_head = (x.transpose(0, 1)[None] for x in piece)
        pieces.append(modeling.eager_attention_forward(module, *by_head, mask[None, None], size**-0.5)[0][0])
    expected = torch.cat(pieces)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    for ours, exact in zip(
        torch.autograd.grad(out, given, dout), torch.autograd.grad(expected, theirs, dout), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("force", "documents"),
    [("flash", [[200, 56], [256]]), ("cudnn", [[256], [256]]), ("cudnn", [[128, 128], [128, 128]])],
)
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
    ("cudnn", [[128, 128], [128, 128]]),
    ("hybrid", [[256], [256]]),
    ("hybrid", [[129]]),
    ("hybrid", [[128, 128], [128, 128]]),
    ("triton", [[200, 56], [256]]),
    ("triton", [[1, 1, 301, 2]]),
    ("triton", [[1030]]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bf16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize(("force", "documents"), CASES)
def test_cuda_against_the_reference(force, documents, heads, kv_heads, size, dtype, micro_batch) -> None:
    mb = micro_batch(documents, "cuda")
    tokens = mb.sequences * mb.length
    torch.manual_seed(0)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size, device="cuda", dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    dout = torch.randn(tokens, heads, size, device="cuda", dtype=dtype)
    out, saved = attention(q, k, v, mb, force)
    assert saved.backend == ("triton" if force == "hybrid" else force)
    grads = attention_backward(dout, q, k, v, out, saved, mb)

    wide = [x.double() for x in (q, k, v)]
    expected, lse = reference.attention(*wide, mb.positions, mb.sequences, mb.length)
    theirs = reference.attention_backward(dout.double(), *wide, expected, lse, mb.positions, mb.sequences, mb.length)
    for ours, exact in zip((out, *grads), (expected, *theirs), strict=True):
        assert (ours.double() - exact).abs().max() <= 2e-2 * exact.abs().max() + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("force", "documents"), [("flash", [3000, 1096]), ("triton", [3000, 1096]), ("hybrid", [2048, 2048])]
)
def test_deterministic_when_asked(force, documents, micro_batch) -> None:
    mb = micro_batch([documents], "cuda")
    torch.manual_seed(0)
    q, dout = (torch.randn(4096, 8, 64, device="cuda", dtype=bf16) for _ in range(2))
    k, v = (torch.randn(4096, 2, 64, device="cuda", dtype=bf16) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    out, saved = attention(q, k, v, mb, force)
    first = attention_backward(dout, q, k, v, out, saved, mb)
    for _ in range(5):
        assert torch.equal(attention(q, k, v, mb, force)[0], out)
        again = attention_backward(dout, q, k, v, out, saved, mb)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("force", ["flash", "cudnn", "hybrid", "triton"])
def test_every_implementation_scales_scores(force, micro_batch) -> None:
    mb = micro_batch([[256], [256]], "cuda")
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(512, 4, 64, device="cuda", dtype=bf16) for _ in range(4))
    out, saved = attention(q, k, v, mb, force, scale=0.3)
    grads = attention_backward(dout, q, k, v, out, saved, mb, scale=0.3)
    wide = [x.double() for x in (q, k, v)]
    layout = mb.positions, mb.sequences, mb.length
    expected, lse = reference.attention(*wide, *layout, scale=0.3)
    theirs = reference.attention_backward(dout.double(), *wide, expected, lse, *layout, scale=0.3)
    for x, y in zip((out, *grads), (expected, *theirs), strict=True):
        assert (x.double() - y).abs().max() <= 2e-2 * y.abs().max()


def test_the_scale_of_scores() -> None:
    """A scale is the same as queries that are multiplied by it."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(10, 2, 6, dtype=torch.float64) for _ in range(4))
    positions = torch.arange(10)
    out, lse = reference.attention(q, k, v, positions, 1, 10, scale=0.7)
    dq, dk, dv = reference.attention_backward(dout, q, k, v, out, lse, positions, 1, 10, scale=0.7)
    factor = 0.7 * 6**0.5
    again, same = reference.attention(q * factor, k, v, positions, 1, 10)
    scaled = reference.attention_backward(dout, q * factor, k, v, again, same, positions, 1, 10)
    for x, y in zip((out, dq, dk, dv), (again, scaled[0] * factor, *scaled[1:]), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(16, 2, 64), (4, 2, 128), (4, 1, 80), (2, 1, 256), (12, 2, 256), (4, 1, 512)]
)
def test_triton_with_windows_and_sinks(heads, kv_heads, size, window, micro_batch) -> None:
    mb = micro_batch([[700, 324], [1024]], "cuda")
    torch.manual_seed(0)
    q, dout = (torch.randn(2048, heads, size, device="cuda", dtype=bf16) for _ in range(2))
    k, v = (torch.randn(2048, kv_heads, size, device="cuda", dtype=bf16) for _ in range(2))
    extras = {"window": window, "sinks": torch.randn(heads, device="cuda", dtype=bf16)}

    def results(dtype: torch.dtype):
        inputs = [x.to(dtype) for x in (q, k, v)]
        grad_sinks = torch.zeros(heads, device="cuda", dtype=reference.wide(dtype))
        out, saved = attention(*inputs, mb, **extras)
        grads = attention_backward(dout.to(dtype), *inputs, out, saved, mb, **extras, grad_sinks=grad_sinks)
        return saved.backend, (out, *grads, grad_sinks)

    (chosen, ours), (wide, exact) = results(bf16), results(torch.float64)
    assert (chosen, wide) == ("triton", "reference")
    for name, x, y in zip(("out", "dq", "dk", "dv", "dsinks"), ours, exact, strict=True):
        assert (x.double() - y).abs().max() <= 2e-2 * y.abs().max(), name
