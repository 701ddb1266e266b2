"""A mixture of experts of 8,192 tokens: Qwen3-30B-A3B's and GPT-OSS-20B's routing, rows and grouped products."""

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Case
from rptrain.kernels import grouped, moe, moe_rows
from rptrain.kernels.reference import moe as reference

TOKENS = 8192
SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 1536, 768), "gpt-oss-20b": (32, 4, 2880, 5760, 2880)}


def cases() -> list[Case]:
    return [case for name in SHAPES for make in (_routing, _rows, _products) for case in make(name)]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _permutation(experts: int, active: int) -> moe.Permutation:
    return moe.permute(moe.choose(_random(TOKENS, experts), active), experts)


def _routing(name: str) -> Iterator[Case]:
    experts, active, *_ = SHAPES[name]
    logits, dweights = _random(TOKENS, experts), _random(TOKENS, active)
    choice = moe.choose(logits, active)
    weights = moe.route(logits, choice, True)
    yield Case(
        f"choose, {name}",
        lambda: moe.choose(logits, active),
        {"eager": lambda: reference.choose(logits, active), "topk": lambda: logits.topk(active)},
        logits.nbytes + choice.nbytes,
    )
    compiled = torch.compile(reference.route)
    yield Case(
        f"route, {name}",
        lambda: moe.route(logits, choice, True),
        {"eager": lambda: reference.route(logits, choice, True), "compiled": lambda: compiled(logits, choice, True)},
        choice.nbytes + 2 * weights.nbytes,
    )
    back = (dweights, logits, choice, True)
    compiled_back = torch.compile(reference.route_backward)
    yield Case(
        f"route backward, {name}",
        lambda: moe.route_backward(*back),
        {"eager": lambda: reference.route_backward(*back), "compiled": lambda: compiled_back(*back)},
        2 * logits.nbytes + choice.nbytes + dweights.nbytes,
    )
    yield Case(f"permute, {name}", lambda: moe.permute(choice, experts), {}, 3 * choice.nbytes)


def _rows(name: str) -> Iterator[Case]:
    experts, active, hidden, _, intermediate = SHAPES[name]
    perm = _permutation(experts, active)
    x, rows, weights = _random(TOKENS, hidden), _random(TOKENS * active, hidden), _random(TOKENS, active)
    dact, act = _random(TOKENS * active, intermediate), _random(TOKENS * active, intermediate)
    compiled_gather, compiled_combine = torch.compile(reference.gather), torch.compile(reference.combine)
    compiled_weigh = torch.compile(reference.weigh)
    yield Case(
        f"gather, {name}",
        lambda: moe_rows.gather(x, perm),
        {
            "eager": lambda: reference.gather(x, perm.order, active),
            "compiled": lambda: compiled_gather(x, perm.order, active),
        },
        x.nbytes + rows.nbytes,
    )
    yield Case(
        f"combine, {name}",
        lambda: moe_rows.combine(rows, perm, weights),
        {
            "eager": lambda: reference.combine(rows, perm.places, weights),
            "compiled": lambda: compiled_combine(rows, perm.places, weights),
        },
        x.nbytes + rows.nbytes,
    )
    yield Case(
        f"combine backward, {name}",
        lambda: moe_rows.combine_backward(x, rows, perm, weights),
        nbytes=x.nbytes + 2 * rows.nbytes,
    )
    yield Case(
        f"weigh, {name}",
        lambda: moe_rows.router_weight_grad(dact, act, perm, weights),
        {
            "eager": lambda: reference.weigh(dact, act, weights, perm.order),
            "compiled": lambda: compiled_weigh(dact, act, weights, perm.order),
        },
        4 * act.nbytes,
    )


def _products(name: str) -> Iterator[Case]:
    """Gate and up: the product, that for the input's gradient, and the weight's gradient, in the stored layout."""
    experts, active, hidden, gate_up, _ = SHAPES[name]
    ends = _permutation(experts, active).ends
    x, dy = _random(TOKENS * active, hidden), _random(TOKENS * active, gate_up)
    w = _random(experts, hidden, gate_up) if name.startswith("gpt") else _random(experts, gate_up, hidden).mT
    acc = torch.zeros_like(w, dtype=torch.float32)
    flops = 2.0 * x.shape[0] * hidden * gate_up
    for what, a, b in (("product", x, w), ("input gradient", dy, w.mT)):
        yield Case(
            f"grouped {what}, {name}",
            lambda a=a, b=b: grouped.grouped_mm(a, b, ends),
            {
                "triton": lambda a=a, b=b: grouped.grouped_mm_triton(a, b, ends),
                "torch": lambda a=a, b=b: torch.nn.functional.grouped_mm(a, b, offs=ends),
            },
            x.nbytes + dy.nbytes + w.nbytes,
            flops,
        )
    yield Case(
        f"grouped weight gradient, {name}",
        lambda: grouped.grouped_weight_grad(acc, x, dy, ends),
        {"torch, rounded to bfloat16": lambda: torch.nn.functional.grouped_mm(x.T, dy, offs=ends)},
        x.nbytes + dy.nbytes + 2 * acc.nbytes,
        flops,
    )
    bias = _random(experts, gate_up)
    yield Case(
        f"grouped product with bias, {name}",
        lambda: grouped.grouped_mm(x, w, ends, bias),
        {"triton": lambda: grouped.grouped_mm_triton(x, w, ends, bias)},
        x.nbytes + dy.nbytes + w.nbytes,
        flops,
    )
    acc_bias = torch.zeros(experts, gate_up, device="cuda")
    yield Case(
        f"grouped bias gradient, {name}", lambda: grouped.grouped_bias_grad(acc_bias, dy, ends), nbytes=dy.nbytes
    )
