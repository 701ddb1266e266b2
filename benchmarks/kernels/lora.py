"""Dropout, and the adapters of q, k and v of rank 16, at Qwen3-1.7B's and Llama-3.1-8B's shapes; 8,192 tokens."""

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Case
from rptrain.kernels.dropout import Dropout, dropout
from rptrain.kernels.lora import add_lora, lora_backward_input, lora_backward_weights

TOKENS, LENGTH, RANK = 8192, 2048, 16
SHAPES = {"qwen3-1.7b": (2048, (2048, 1024, 1024)), "llama-3.1-8b": (4096, (4096, 1024, 1024))}


def cases() -> list[Case]:
    return [case for name in SHAPES for case in _cases(name)]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _cases(name: str) -> Iterator[Case]:
    hidden, widths = SHAPES[name]
    drop = Dropout(0.05, torch.tensor([1, 2, 3], device="cuda"), LENGTH, 4, 0)
    x, y = _random(TOKENS, hidden), _random(TOKENS, sum(widths))
    a, b = _random(3 * RANK, hidden), [_random(width, RANK) for width in widths]
    starts = (0, widths[0], widths[0] + widths[1])
    dx, dy = _random(TOKENS, hidden), _random(TOKENS, sum(widths))
    grad_a, *grad_b = (torch.zeros_like(weight, dtype=torch.float32) for weight in (a, *b))
    torch_dropout = torch.compile(torch.nn.functional.dropout)
    yield Case(
        f"dropout, {name}",
        lambda: dropout(x, drop),
        {"eager": lambda: torch.nn.functional.dropout(x, 0.05), "compiled": lambda: torch_dropout(x, 0.05)},
        2 * x.nbytes,
    )
    flops = 2.0 * TOKENS * RANK * (3 * hidden + sum(widths))

    def backward(where: Dropout | None) -> None:
        dh = lora_backward_input(dy, a, b, starts, 2.0, where, dx)
        lora_backward_weights(dy, dh, x, a, starts, 2.0, where, grad_a, grad_b)

    for what, where in (("", None), (" with dropout", drop)):
        yield Case(
            f"lora{what}, {name}",
            lambda where=where: add_lora(y, x, a, b, starts, 2.0, where),
            nbytes=x.nbytes + 2 * y.nbytes,
            flops=flops,
        )
        yield Case(
            f"lora backward{what}, {name}",
            lambda where=where: backward(where),
            nbytes=x.nbytes + dy.nbytes + 2 * dx.nbytes,
            flops=2 * flops + 2.0 * TOKENS * RANK * 3 * hidden,
        )
