"""Loss and gradients of the output projection, and the softmax of one chunk by itself."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import Case
from rptrain.kernels import linear_cross_entropy as lce
from rptrain.kernels.batch import IGNORED
from rptrain.kernels.reference.dense import cross_entropy_

TOKENS = 8192
SHAPES = {"Qwen3-1.7B": (2048, 151936), "Llama-3.1-8B": (4096, 128256)}  # D, V


def cases() -> list[Case]:
    return [case for name, shape in SHAPES.items() for case in (_whole(name, *shape), _softmax(name, shape[1]))]


def _whole(name: str, hidden: int, vocab: int) -> Case:
    torch.manual_seed(0)
    h = torch.randn(TOKENS, hidden, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    labels = torch.randint(vocab, (TOKENS,), device="cuda")
    sums = torch.zeros(vocab, hidden, device="cuda")

    def gradients(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        leaves = h.detach().requires_grad_(), w.detach().requires_grad_()
        return lambda: torch.autograd.grad(loss(*leaves), leaves)

    def plain(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), labels, ignore_index=IGNORED, reduction="sum")

    others = {"eager": gradients(plain), "compiled": gradients(torch.compile(plain))}
    others["half sums"] = lambda: lce.linear_cross_entropy_backward(h, w, labels, 1.0, sums, half_sums=True)
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        pass
    else:
        liger = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
        others["liger"] = gradients(lambda h, w: liger(w, h, labels))
    logits, dh, dw = h.new_empty(TOKENS, vocab), torch.empty_like(h), torch.empty_like(w)

    def products() -> None:
        torch.mm(h, w.t(), out=logits)
        torch.mm(logits, w, out=dh)
        torch.mm(logits.t(), h, out=dw)

    return Case(
        f"linear cross-entropy, {name}",
        ours=lambda: lce.linear_cross_entropy_backward(h, w, labels, 1.0, sums),
        others=others,
        nbytes=2 * h.nbytes + w.nbytes + 2 * sums.nbytes,
        flops=6.0 * TOKENS * hidden * vocab,
        floor=products,
    )


def _softmax(name: str, vocab: int) -> Case:
    """In place: after the first run the logits are what the run before left, which costs the same."""
    tokens = lce.chunk_tokens(vocab, 2)
    logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(vocab, (tokens,), device="cuda")
    losses, lse = torch.empty(2, tokens, device="cuda")
    compiled = torch.compile(cross_entropy_)
    return Case(
        f"softmax of logits, {name}",
        ours=lambda: lce.cross_entropy_triton(logits, vocab, labels, 1.0, losses, lse),
        others={
            "eager": lambda: cross_entropy_(logits, labels, 1.0),
            "compiled": lambda: compiled(logits, labels, 1.0),
        },
        nbytes=2 * logits.nbytes,
    )
