"""Attention over whole rows, one long row, and documents of mixed lengths."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernels.case import Case
from rptrain.kernels.attention import attention, attention_backward
from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.half import Heads, scaled_heads

TOKENS = 8192
SHAPES = {"Qwen3-1.7B": (16, 8, 128), "Llama-3.1-8B": (32, 8, 128)}  # H, K, C
MIXED = [1700, 348, 900, 60, 1024, 64, 2500, 77, 19, 1500]
LAYOUTS = {"4 x 2048": [[2048]] * 4, "1 x 8192": [[TOKENS]], "mixed": [MIXED]}  # rows of documents


def micro_batch(documents: list[list[int]]) -> MicroBatch:
    flat = [length for row in documents for length in row]
    positions = torch.cat([torch.arange(length) for length in flat])
    return MicroBatch(
        sequences=len(documents),
        length=sum(documents[0]),
        positions=positions.cuda(),
        labels=torch.full_like(positions, -100).cuda(),
        cu_seqlens=torch.tensor([0, *torch.tensor(flat).cumsum(0)], dtype=torch.int32, device="cuda"),
        max_seqlen=max(flat),
        uniform=len(set(flat)) == 1,
    )


def inputs(heads: int, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (a view of the fused product, as in a block) and dout, bfloat16."""
    torch.manual_seed(0)
    whole = torch.randn(TOKENS, heads + 2 * kv_heads, size, device="cuda", dtype=torch.bfloat16)
    q, k, v = whole.split([heads, kv_heads, kv_heads], 1)
    return q.contiguous(), k.contiguous(), v, torch.randn_like(q, memory_format=torch.contiguous_format)


def forward_flops(documents: list[list[int]], heads: int, size: int) -> float:
    """Of two products over the lower triangle; backward takes two and a half times as many."""
    return sum(2.0 * length**2 * heads * size for row in documents for length in row)


def cases() -> list[Case]:
    return [
        case
        for model, shape in SHAPES.items()
        for layout, documents in LAYOUTS.items()
        for case in _cases(f"{model}, {layout}", documents, *shape)
    ]


def _cases(name: str, documents: list[list[int]], heads: int, kv_heads: int, size: int) -> list[Case]:
    mb = micro_batch(documents)
    q, k, v, dout = inputs(heads, kv_heads, size)
    forward, backward = {}, {}
    for force in ("flash", "cudnn") if mb.uniform else ("flash",):
        forward[force], backward[force] = pair(force, q, k, v, dout, mb)
    forward["compiled"], backward["compiled"] = _flex(q, k, v, dout, mb)
    forward["triton"], backward["triton"] = pair("triton", q, k, v, dout, mb)
    forward["float16 sums"], backward["float16 sums"] = pair(None, *map(scaled_heads, (q, k, v)), dout, mb)
    ours = pair(None, q, k, v, dout, mb)  # what training takes
    flops = forward_flops(documents, heads, size)
    nbytes = sum(x.nbytes for x in (q, k, v, dout))
    return [
        Case(f"forward, {name}", ours[0], forward, nbytes, flops),
        Case(f"backward, {name}", ours[1], backward, 2 * nbytes, 2.5 * flops),
    ]


def pair(force: str | None, q: Heads, k: Heads, v: Heads, dout: Tensor, mb: MicroBatch):
    """Forward and backward of one backend."""
    out, saved = attention(q, k, v, mb, force)
    return (
        lambda: attention(q, k, v, mb, force),
        lambda: attention_backward(dout, q, k, v, out, saved, mb),
    )


def _flex(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mb: MicroBatch):
    """The framework's compiled attention with a mask of documents, made beforehand."""
    starts = torch.arange(TOKENS, device="cuda") - mb.positions

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts[query])

    mask = create_block_mask(sees, None, None, TOKENS, TOKENS, device="cuda")
    torch._functorch.config.donated_buffer = False  # the backward is run many times
    compiled = torch.compile(flex_attention)
    leaves = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]
    dout = dout.transpose(0, 1)[None]

    def forward() -> Tensor:
        return compiled(*leaves, block_mask=mask, enable_gqa=True)

    out = forward()
    return forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
