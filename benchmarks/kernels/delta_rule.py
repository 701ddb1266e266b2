"""The gated delta rule and its layer at the sizes of Qwen3.5-27B, beside flash-linear-attention where it is installed.

flash-linear-attention 0.6.0 refuses its backward on Hopper with Triton 3.4 to 3.7.0, which gives wrong gradients at
some sizes; this check is switched off here, so its times count and its values do not.
"""

import importlib.util

import torch
from torch import Tensor

from benchmarks.kernels.attention import micro_batch
from benchmarks.kernels.case import Case
from rptrain.kernels import fp8
from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.delta_rule import gated_delta_rule, gated_delta_rule_backward
from rptrain.models.layers.delta_net import DeltaNet

HIDDEN, KEY_HEADS, HEADS, SIZE, EPS = 5120, 16, 48, 128, 1e-6
LAYOUTS = {"1 x 8192": [8192], "8 x 1024": [1024] * 8, "1 x 65536": [65536]}
FLA = importlib.util.find_spec("fla") is not None


def cases() -> list[Case]:
    if FLA:
        import fla.ops.common.chunk_o as chunk_o

        chunk_o.TRITON_ABOVE_3_7_1 = True
    operations = [_operation(name, lengths) for name, lengths in LAYOUTS.items()]
    return [*(case for pair in operations for case in pair), *_layer([8192])]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _documents(lengths: list[int]) -> MicroBatch:
    mb = micro_batch([lengths])
    mb.documents  # noqa: B018 - made before a graph is captured
    return mb


def _operation(name: str, lengths: list[int]) -> list[Case]:
    """Forward, and forward with backward; flash-linear-attention reads equal documents as sequences of a batch."""
    tokens, mb = sum(lengths), _documents(lengths)
    q, k = (torch.nn.functional.normalize(random(tokens, KEY_HEADS, SIZE), dim=-1) for _ in range(2))
    v, dout = random(tokens, HEADS, SIZE), random(tokens, HEADS, SIZE)
    decay, beta = -torch.rand(tokens, HEADS, device="cuda"), torch.rand(tokens, HEADS, device="cuda")

    def forward():
        return gated_delta_rule(q, k, v, decay, beta, mb.documents)

    def both():
        kept = forward()[2]
        return gated_delta_rule_backward(dout, q, k, v, decay, beta, kept, mb.documents)

    others = [{}, {}]
    if FLA:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        leaves = [
            x.detach().unflatten(0, (len(lengths), -1)).requires_grad_() for x in (q, k, v, decay, beta.bfloat16())
        ]
        cotangent = dout.view_as(leaves[2])

        def theirs() -> Tensor:
            return chunk_gated_delta_rule(*leaves, scale=1.0)[0]

        others = [{"fla": theirs}, {"fla": lambda: torch.autograd.grad(theirs(), leaves, cotangent)}]
    nbytes = sum(x.nbytes for x in (q, k, v, dout, decay, beta))
    return [
        Case(f"forward, {name}", forward, others[0], nbytes),
        Case(f"forward and backward, {name}", both, others[1], 2 * nbytes),
    ]


def _layer(lengths: list[int]) -> list[Case]:
    """The mixer with its products: forward, and forward with the gradients of its input and all weights."""
    tokens, mb = sum(lengths), _documents(lengths)
    net = DeltaNet.of(HIDDEN, KEY_HEADS, HEADS, SIZE, SIZE, 4, eps=EPS)
    params = {
        "delta_qkvz": random(2 * (KEY_HEADS + HEADS) * SIZE, HIDDEN) * 0.02,
        "delta_ba": random(2 * HEADS, HIDDEN) * 0.02,
        "delta_out": random(HIDDEN, HEADS * SIZE) * 0.02,
        "delta_conv": random((2 * KEY_HEADS + HEADS) * SIZE, 1, 4) * 0.2,
        "delta_norm": torch.ones(SIZE, device="cuda", dtype=torch.bfloat16),
        "a_log": torch.rand(HEADS, device="cuda"),
        "dt_bias": torch.ones(HEADS, device="cuda"),
    }
    grads = {name: torch.zeros(x.shape, device="cuda") for name, x in params.items()}
    x, dy = random(tokens, HIDDEN), random(tokens, HIDDEN)
    operand = fp8.operand(x, net.form(params))

    def both():
        _, saved = net.forward(params, operand, mb)
        return net.backward(params, grads, saved, dy, mb)

    others = [{}, {}]
    if FLA:
        from fla.layers.gated_deltanet import GatedDeltaNet

        theirs = GatedDeltaNet(
            hidden_size=HIDDEN, head_dim=SIZE, num_heads=KEY_HEADS, num_v_heads=HEADS, expand_v=1, norm_eps=EPS
        ).to("cuda", torch.bfloat16)
        leaf = x[None].clone().requires_grad_()
        leaves = [leaf, *theirs.parameters()]
        others = [
            {"fla": lambda: theirs(leaf, use_cache=False)[0]},
            {"fla": lambda: torch.autograd.grad(theirs(leaf, use_cache=False)[0], leaves, dy[None])},
        ]
    products = 2.0 * tokens * sum(params[name].numel() for name in ("delta_qkvz", "delta_ba", "delta_out"))
    return [
        Case("layer forward", lambda: net.forward(params, operand, mb), others[0], flops=products),
        Case("layer forward and backward", both, others[1], flops=3 * products),
    ]
