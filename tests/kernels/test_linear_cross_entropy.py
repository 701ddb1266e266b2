"""The loss and its gradients against autograd in float64; the softmax kernel against the reference."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels import linear_cross_entropy as lce
from rptrain.kernels.batch import IGNORED
from rptrain.kernels.reference.dense import cross_entropy_, wide
from rptrain.kernels.target import Target, nvidia
from tests.kernels.exact import dtypes

from .autograd import LinearCrossEntropy


def small(vocab: int, itemsize: int, gradient: bool, target: Target) -> lce.Sizes:
    """Stands in for `sizes`: several blocks in a short row."""
    return lce.cut(-(-vocab // lce.ALIGNMENT) * lce.ALIGNMENT * itemsize, resident=32, keep=2, group=2)


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
paths = pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        *(pytest.param(dtype, False, id=f"{dtype}-reference") for dtype in TOLERANCES),
        pytest.param(torch.float32, True, id="torch.float32-kernel"),
        pytest.param(torch.float16, True, id="torch.float16-kernel"),
        pytest.param(torch.bfloat16, True, id="torch.bfloat16-kernel"),
    ],
)


@pytest.fixture
def path(kernel: bool, monkeypatch, request) -> str:
    """The device; the public functions take the reference's or the kernel's path there, whatever it is."""
    monkeypatch.setattr(lce, "fused", lambda *tensors: kernel)
    return request.getfixturevalue("device") if kernel else "cpu"


def inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str = "cpu"):
    torch.manual_seed(0)
    h, w = torch.randn(tokens, hidden).to(dtype), (torch.randn(vocab, hidden) / hidden**0.5).to(dtype)
    labels = torch.randint(vocab, (tokens,))
    if tokens > 1:
        labels[::3] = IGNORED
    return h.to(device), w.to(device), labels.to(device)


def expected(h: Tensor, w: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, dh and dw of autograd in float64."""
    h64, w64 = (tensor.to(torch.float64, copy=True).requires_grad_() for tensor in (h, w))
    loss = F.cross_entropy(h64 @ w64.T, labels, ignore_index=IGNORED, reduction="sum")
    dh, dw = torch.autograd.grad(scale * loss, (h64, w64))
    return loss.detach(), dh, dw


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


@pytest.mark.sample(7, gate=14)
@paths
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(9, 5, 7), (1, 1, 1), (1, 4, 3), (37, 8, 33), (9, 16, 64)])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 64 * 16, 2**28])
def test_loss_and_gradients(tokens, hidden, vocab, chunk_bytes, dtype, path, monkeypatch) -> None:
    monkeypatch.setattr(lce, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(lce, "PIECE_BYTES", 4 * 33 * 5)
    h, w, labels = inputs(tokens, hidden, vocab, dtype, path)
    grad_w = torch.ones(w.shape, dtype=wide(dtype), device=path)
    loss, dh = lce.linear_cross_entropy_backward(h, w, labels, 0.3, grad_w)
    assert loss.shape == () and loss.dtype == wide(dtype) and dh.dtype == dtype
    assert torch.equal(loss, lce.linear_cross_entropy(h, w, labels))
    for ours, theirs in zip((loss, dh, grad_w - 1), expected(h, w, labels, 0.3), strict=True):
        close(ours, theirs, TOLERANCES[dtype])


@paths
def test_under_autograd(dtype, path) -> None:
    h, w, labels = inputs(9, 5, 7, dtype, path)
    h.requires_grad_()
    w.requires_grad_()
    loss, count = LinearCrossEntropy.apply(h, w, labels)
    assert count.item() == 6 and not count.requires_grad
    (0.3 * loss).backward()
    for ours, theirs in zip((loss, h.grad, w.grad), expected(h, w, labels, 0.3), strict=True):
        close(ours, theirs, TOLERANCES[dtype])


@paths
def test_nothing_supervised(dtype, path) -> None:
    h, w, labels = inputs(6, 4, 5, dtype, path)
    labels[:] = IGNORED
    grad_w = torch.zeros(w.shape, dtype=wide(dtype), device=path)
    loss, dh = lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)
    assert loss == 0 and not dh.any() and not grad_w.any()
    assert lce.linear_cross_entropy(h, w, labels) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, True)])
def test_half_sums_are_as_exact(dtype, path, monkeypatch) -> None:
    """Beside float32 sums, and the same bits every time; float32 matrices have float32 sums in any case."""
    monkeypatch.setattr(lce, "CHUNK_BYTES", 2 * 128 * 16)
    h, w, labels = inputs(21, 72, 101, dtype, path)
    w[7], h[5] = 20 * w[7], h[5] / 50
    wide_grads = [torch.ones(w.shape, device=path) for _ in range(3)]
    full, half, again = (
        (*lce.linear_cross_entropy_backward(h, w, labels, 0.3, grad_w, half_sums=half_sums), grad_w - 1)
        for grad_w, half_sums in zip(wide_grads, (False, True, True), strict=True)
    )
    assert torch.equal(half[0], lce.linear_cross_entropy(h, w, labels, half_sums=True))
    for ours, same, theirs, exact in zip(half, again, full, expected(h, w, labels, 0.3), strict=True):
        assert torch.equal(ours, same) and torch.equal(ours, theirs) == (dtype == torch.float32)
        error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (ours, theirs))
        assert error <= max(1.5 * allowed, 2**-10), (error, allowed)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, True)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
def test_half_sums_carry_nan_and_infinity_to_the_loss(value, dtype, path) -> None:
    h, w, labels = inputs(9, 5, 7, dtype, path)
    h[4, 2] = value
    assert lce.linear_cross_entropy(h, w, labels, half_sums=True).isnan()


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, False), (torch.float32, True)])
def test_large_logits_do_not_overflow(dtype, path) -> None:
    h, w, labels = inputs(6, 4, 5, dtype, path)
    grad_w = torch.zeros_like(w)
    loss, dh = lce.linear_cross_entropy_backward(1000 * h, w, labels, 1.0, grad_w)
    assert all(tensor.isfinite().all() for tensor in (loss, dh, grad_w))


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, False), (torch.bfloat16, True)])
def test_columns_beyond_the_vocabulary_are_zero(dtype, path, monkeypatch) -> None:
    if path != "cpu":
        pytest.skip("products on the CPU read what follows a row, others do not")

    def product(a: Tensor, b: Tensor, out: Tensor, in_half: bool) -> None:
        out.as_strided((9, lce.ALIGNMENT), (lce.ALIGNMENT, 1)).fill_(float("nan"))
        torch.mm(a, b.t(), out=out)

    h, w, labels = inputs(9, 5, 7, dtype, path)
    monkeypatch.setattr(lce, "_product", product)
    for _, dlogits in lce._chunks(h, w, labels, 0.3, torch.zeros(2, 9), False):
        assert not dlogits.as_strided((9, lce.ALIGNMENT - 7), (lce.ALIGNMENT, 1), 7).any()


def padded(logits: Tensor, device: str) -> Tensor:
    """The buffer that the kernel takes; what it must not use is NaN."""
    tokens, vocab = logits.shape
    buffer = torch.full((tokens, -(-vocab // lce.ALIGNMENT) * lce.ALIGNMENT), float("nan"), dtype=logits.dtype)
    buffer[:, :vocab] = logits
    return buffer.to(device)


def softmax(logits: Tensor, labels: Tensor, scale: float | None, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, log-sum-exps and what is left in place of the logits, by the kernel."""
    buffer, vocab = padded(logits, device), logits.shape[1]
    losses, lse = torch.empty(2, len(labels), device=device)
    lce.cross_entropy_triton(buffer, vocab, labels.to(device), scale, losses, lse)
    return losses.cpu(), lse.cpu(), buffer[:, :vocab].cpu()


def by_reference(logits: Tensor, labels: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gradient = logits.to(dtype, copy=True)
    return *cross_entropy_(gradient, labels, scale), gradient


@pytest.mark.sample(6)
@dtypes
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 257, 5000, 20011, 66000])  # one block, several, padded and not
def test_the_kernel_is_as_exact_as_the_reference(vocab, dtype, device) -> None:
    torch.manual_seed(vocab)
    logits, labels = (4 * torch.randn(4, vocab)).to(dtype), torch.randint(vocab, (4,))
    labels[0], labels[1], labels[3] = 0, IGNORED, vocab - 1  # both ends
    ours, theirs = softmax(logits, labels, 0.7, device), by_reference(logits, labels, 0.7, dtype)
    exact = by_reference(logits, labels, 0.7, torch.float64)
    for our, their, truth in zip(ours, theirs, exact, strict=True):
        error, allowed = ((x.double() - truth).abs().max() for x in (our, their))
        assert error <= 1.5 * allowed + 1e-6 * truth.abs().max()
    assert all(not x[1].any() for x in ours)


@pytest.mark.sample(3)
@pytest.mark.parametrize("vocab", [9000, 66000])  # kept whole, and not
@dtypes
def test_the_kernel_repeats_its_bits(dtype, vocab, device) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, vocab).to(dtype), torch.tensor([5, IGNORED, vocab - 1])
    first, second = (softmax(logits, labels, 0.7, device) for _ in range(2))
    only_loss = softmax(logits, labels, None, device)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert torch.equal(first[0], only_loss[0]) and torch.equal(first[1], only_loss[1])
    assert torch.equal(only_loss[2], logits)


@pytest.mark.sample(3)
@pytest.mark.parametrize("scale", [0.7, None])
@dtypes
def test_programs_take_rows_in_turn(dtype, scale, device, monkeypatch) -> None:
    """Two programs for seven rows, ignored ones before, between and after others: each row's bits are its own."""
    monkeypatch.setattr(lce, "programs", lambda device, each: 2)
    monkeypatch.setattr(lce, "sizes", small)
    torch.manual_seed(0)
    vocab = 3001
    logits, labels = torch.randn(7, vocab).to(dtype), torch.randint(vocab, (7,))
    labels[[0, 3, 5]] = IGNORED
    assert lce.sizes(vocab, dtype.itemsize, True, nvidia(9, 0)).blocks > 1
    together = softmax(logits, labels, scale, device)
    for row in range(7):
        alone = softmax(logits[row : row + 1], labels[row : row + 1], scale, device)
        assert all(torch.equal(x[row : row + 1], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.sample(2)
@dtypes
def test_the_target_may_be_anywhere(dtype, device, monkeypatch) -> None:
    """In each tile of a row, whether it is kept or read again, at its ends and inside."""
    monkeypatch.setattr(lce, "sizes", small)
    vocab = 1501
    cut = lce.sizes(vocab, dtype.itemsize, True, nvidia(9, 0))
    assert cut.blocks > 1 and cut.kept == 2
    tile = 512 * cut.warps // dtype.itemsize
    labels = torch.tensor([min(i * tile + j, vocab - 1) for i in range(-(-vocab // tile)) for j in (0, 13, tile - 1)])
    logits = torch.randn(1, vocab).to(dtype).expand(len(labels), -1)
    ours, theirs = softmax(logits, labels, 1.0, device), by_reference(logits, labels, 1.0, torch.float64)
    close(ours[2], theirs[2], 2 * torch.finfo(dtype).eps)


def test_the_kernel_subtracts_the_maximum(device) -> None:
    """Rows far above and below 0, one that rises block by block, and logits of -inf, whose probability is 0."""
    vocab = 20000
    logits = torch.randn(4, vocab) + torch.tensor([1e4, -1e4, 0, 0]).unsqueeze(1)
    logits[2] = torch.arange(vocab) * 1e-2
    logits[3, : vocab // 2] = float("-inf")
    labels = torch.tensor([3, 4, vocab - 1, vocab - 1])
    for ours, exact in zip(
        softmax(logits, labels, 1.0, device), by_reference(logits, labels, 1.0, torch.float64), strict=True
    ):
        close(ours, exact, 1e-6)


def test_ignored_rows_are_not_read(device) -> None:
    losses, lse, gradient = softmax(torch.full((1, 70), float("nan")), torch.tensor([IGNORED]), 1.0, device)
    assert losses == 0 and lse == 0 and not gradient.any()


@pytest.mark.parametrize(
    ("vocab", "itemsize", "tokens"),
    [(32000, 2, 4096), (151936, 2, 4096), (201088, 2, 3328), (151936, 4, 2176), (2**26, 2, 10), (2**30, 2, 1)],
)
def test_chunks_stay_within_their_bytes(vocab: int, itemsize: int, tokens: int) -> None:
    assert lce.chunk_tokens(vocab, itemsize) == tokens


def test_workspace_by_hand() -> None:
    """Logits of a chunk at the aligned width, a piece in the wide type, two numbers and a float64 for each token."""
    assert lce.loss_workspace_bytes(10, 100, 2) == 10 * 128 * 2 + 10 * 100 * 4 + 10 * (2 * 4 + 8)
    assert lce.loss_workspace_bytes(10, 100, 8) == 10 * 128 * 8 + 10 * 100 * 8 + 10 * (2 * 8 + 8)
    piece = lce.PIECE_BYTES // (4 * 151936) * 151936 * 4
    assert lce.loss_workspace_bytes(8192, 151936, 2) == 4096 * 151936 * 2 + piece + 8192 * (2 * 4 + 8)


@pytest.mark.parametrize(
    ("vocab", "itemsize", "gradient", "capability", "cut"),
    [
        (1, 2, True, (9, 0), (1, 0, 0, 1, 0)),
        (1000, 4, True, (9, 0), (1, 3, 2, 2, 32)),
        (32000, 2, True, (9, 0), (16, 0, 0, 8, 0)),
        (128256, 2, True, (9, 0), (16, 3, 8, 8, 1)),
        (151936, 2, True, (9, 0), (16, 4, 8, 6, 1)),
        (151936, 2, True, (12, 0), (16, 5, 6, 8, 1)),
        (151936, 2, False, (9, 0), (16, 16, 2, 6, 2)),
        (202047, 4, True, (9, 0), (16, 49, 2, 1, 2)),
    ],
)
def test_a_row_is_cut_into_tiles(vocab, itemsize, gradient, capability, cut) -> None:
    found = lce.sizes(vocab, itemsize, gradient, nvidia(*capability))
    assert found[:5] == cut
    bytes_of_a_tile = 512 * found.warps
    tiles = found.blocks * found.group + found.kept
    assert (tiles - 1) * bytes_of_a_tile < vocab * itemsize <= tiles * bytes_of_a_tile


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_no_value_is_read_on_the_host(dtype) -> None:
    """Meta tensors have none: a branch or a shape that depends on one raises."""
    h, w, labels = (tensor.to("meta") for tensor in inputs(9, 5, 7, dtype))
    grad_w = torch.empty(w.shape, dtype=wide(dtype), device="meta")
    lce.linear_cross_entropy(h, w, labels)
    lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cuda_stays_within_the_workspace(dtype) -> None:
    """Of bytes asked for: blocks of the allocator may be up to 1 MiB larger each. Sorts and scalars are small."""
    h, w, labels = inputs(4096, 64, 5001, dtype, "cuda")
    grad_w = torch.zeros(w.shape, dtype=wide(dtype), device="cuda")
    lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)  # the matrix library's own workspace, once
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)
    bound = lce.loss_workspace_bytes(4096, 5001, dtype.itemsize) + h.nbytes + 2**18
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cuda_never_waits(dtype) -> None:
    h, w, labels = inputs(65, 8, 64, dtype, "cuda")
    grad_w = torch.zeros(w.shape, dtype=wide(dtype), device="cuda")
    lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)
    torch.cuda.set_sync_debug_mode("error")
    try:
        lce.linear_cross_entropy(h, w, labels)
        lce.linear_cross_entropy_backward(h, w, labels, 1.0, grad_w)
    finally:
        torch.cuda.set_sync_debug_mode("default")
