"""The decay and the write strength of a gated delta net: decay = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b).

T tokens, K key heads, H = K r value heads. b and a [T, K, r] are views of a product's output with last stride 1;
a_log and dt_bias [H] are float32 (the wide type).
"""

from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.launch import fused, jit, power_of_2, programs, tl, triton
from rptrain.kernels.reference import delta_gates as reference
from rptrain.kernels.rms_norm import add_partials

TILE = 1024  # elements of a program of 4 warps: never less than its threads, so that no element is held twice


def gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """decay and beta [T, H], contiguous, in float32 (float64 for float64); beta is rounded to the type of b.

    A token moves 2 H elements and 8 H bytes. Backward needs only the inputs.
    """
    if not fused(b):
        return reference.gates(b, a, a_log, dt_bias)
    return gates_triton(b, a, a_log, dt_bias)


def gates_backward(
    ddecay: Tensor,
    dbeta: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    into: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
) -> None:
    """Writes the gradients of b and a to `into`, views as they are, which may be b and a themselves.

    ddecay and dbeta [T, H] are float32 (the wide type) and contiguous. Adds the gradients of a_log and dt_bias to
    `grads` [H], if any. A token moves 4 H elements and 8 H bytes.
    """
    run = gates_backward_triton if fused(b) else reference.gates_backward
    run(ddecay, dbeta, b, a, a_log, dt_bias, into, grads)


def gates_triton(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    heads = b.shape[1] * b.shape[2]
    decay, beta = (torch.empty(len(b), heads, dtype=torch.float32, device=b.device) for _ in range(2))
    if len(b):
        options = _launch(b, a)
        _forward[(triton.cdiv(len(b), options["ROWS"]),)](b, a, a_log, dt_bias, decay, beta, len(b), **options)
    return decay, beta


def gates_backward_triton(
    ddecay: Tensor,
    dbeta: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    into: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
) -> None:
    assert ddecay.is_contiguous() and dbeta.is_contiguous()
    assert all(dx.stride() == x.stride() for dx, x in zip(into, (b, a), strict=True))
    if len(b):
        options = _launch(b, a)
        count = min(programs(b.device, 2), triton.cdiv(len(b), options["ROWS"]))
        partials = torch.empty(count, 2, options["H"], dtype=torch.float32, device=b.device)
        _backward[(count,)](ddecay, dbeta, b, a, a_log, dt_bias, *into, partials, len(b), **options)
        add_partials(partials, grads)


def _launch(b: Tensor, a: Tensor) -> dict[str, Any]:
    assert b.stride() == a.stride() and b.stride(2) == 1
    return _constants(b.shape[1], b.shape[2]) | {"TOKEN": b.stride(0), "HEAD": b.stride(1)}


def _constants(heads: int, repeat: int) -> dict[str, Any]:
    block = power_of_2(heads * repeat)
    return {"H": heads * repeat, "REPEAT": repeat, "BLOCK": block, "ROWS": max(1, TILE // block), "num_warps": 4}


@jit
def _places(
    first, tokens, TOKEN: tl.constexpr, HEAD: tl.constexpr,
    H: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where the heads of the tokens from `first` on lie in b and a, and in [T, H]; and which there are."""
    token, head = first + tl.arange(0, ROWS).to(tl.int64), tl.arange(0, BLOCK)
    at = token[:, None] * TOKEN + (head // REPEAT * HEAD + head % REPEAT)[None, :]
    there = (token < tokens)[:, None] & (head < H)[None, :]
    return at, token[:, None] * H + head[None, :], there


@jit
def _rates(a_log, dt_bias, H: tl.constexpr, BLOCK: tl.constexpr):
    """-exp(a_log), and dt_bias."""
    head = tl.arange(0, BLOCK)
    rate = -tl.exp(tl.load(a_log + head, mask=head < H, other=0))
    return rate[None, :], tl.load(dt_bias + head, mask=head < H, other=0)[None, :]


@jit
def _softplus(x):
    """max(x, 0) + log(1 + e), where e = exp(-|x|) may vanish beside 1: its rounding is divided out."""
    e = tl.exp(-tl.abs(x))
    above = 1 + e
    rest = above - 1
    return tl.maximum(x, 0) + tl.where(rest == 0, e, tl.log(above) * (e / tl.where(rest == 0, 1.0, rest)))


@jit
def _forward(
    b, a, a_log, dt_bias, decay, beta, tokens, TOKEN: tl.constexpr, HEAD: tl.constexpr,
    H: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at, out, there = _places(tl.program_id(0) * ROWS, tokens, TOKEN, HEAD, H, REPEAT, BLOCK, ROWS)
    rate, bias = _rates(a_log, dt_bias, H, BLOCK)
    x = tl.load(a + at, mask=there, other=0).to(tl.float32) + bias
    tl.store(decay + out, rate * _softplus(x), mask=there)
    share = tl.sigmoid(tl.load(b + at, mask=there, other=0).to(tl.float32))
    tl.store(beta + out, share.to(b.dtype.element_ty).to(tl.float32), mask=there)


@jit
def _backward(
    ddecay, dbeta, b, a, a_log, dt_bias, db, da, partials, tokens, TOKEN: tl.constexpr, HEAD: tl.constexpr,
    H: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every programs-th tile of tokens; partials are [programs, 2, H]."""
    program, head = tl.program_id(0), tl.arange(0, BLOCK)
    rate, bias = _rates(a_log, dt_bias, H, BLOCK)
    of_log = tl.zeros((ROWS, BLOCK), tl.float32)
    of_bias = of_log
    for tile in range(program, tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        at, out, there = _places(tile * ROWS, tokens, TOKEN, HEAD, H, REPEAT, BLOCK, ROWS)
        x = tl.load(a + at, mask=there, other=0).to(tl.float32) + bias
        share = tl.sigmoid(tl.load(b + at, mask=there, other=0).to(tl.float32))
        grad = tl.load(ddecay + out, mask=there, other=0) * rate
        dx = grad * tl.sigmoid(x)
        of_log += grad * _softplus(x)
        of_bias += dx
        dshare = tl.load(dbeta + out, mask=there, other=0) * share * (1 - share)
        tl.store(da + at, dx.to(da.dtype.element_ty), mask=there)
        tl.store(db + at, dshare.to(db.dtype.element_ty), mask=there)
    partials += program.to(tl.int64) * (2 * H) + head
    tl.store(partials, tl.sum(of_log, 0), mask=head < H)
    tl.store(partials + H, tl.sum(of_bias, 0), mask=head < H)
