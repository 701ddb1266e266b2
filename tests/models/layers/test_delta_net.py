"""The gated delta net against transformers and against a loop over tokens, its documents, and its state."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from rptrain.kernels.fp8 import Operand
from rptrain.kernels.reference.dense import wide
from rptrain.models.layers.delta_net import DeltaNet
from tests.models.conftest import make_micro_batch

LAYOUTS = pytest.mark.parametrize("by_key_head", [False, True], ids=["by kind", "by key head"])
DOCUMENTS = [[70, 1, 3, 65]]
ODD = {"hidden": 13, "key_heads": 3, "value_heads": 6, "key_size": 5, "value_size": 7, "width": 3, "eps": 1e-5}


def documents_of(lengths):
    return make_micro_batch(SimpleNamespace(rotaries=()), lengths)


def shapes(net):
    return {
        **{product.name: (product.outputs, product.inputs) for product in net.products},
        "delta_conv": (net.qkvz.outputs - net.out.inputs, 1, net.width),
        "delta_norm": (net.value_size,),
        "a_log": (net.value_heads,),
        "dt_bias": (net.value_heads,),
    }


def random_parameters(net, dtype):
    generator = torch.Generator().manual_seed(3)
    p = {name: torch.randn(shape, generator=generator).mul_(0.5).to(dtype) for name, shape in shapes(net).items()}
    return p | {name: p[name].to(wide(dtype)) for name in ("a_log", "dt_bias")}


def accumulators(p):
    return {name: torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for name, tensor in p.items()}


def both_ways(net, p, x, dy, mb):
    """The output, and the gradients of the input and of each parameter."""
    y, saved = net.forward(p, Operand(x.dtype, x), mb)
    g = accumulators(p)
    return {"y": y, "x": net.backward(p, g, saved, dy, mb), **g}


def by_loop(net, p, x, lengths):
    """The output by the definition, token by token, for heads one after the other."""
    K, r, C, V = net.key_heads, net.value_heads // net.key_heads, net.key_size, net.value_size
    outputs = []
    for part in x.split(lengths):
        qkvz, ba = part @ p["delta_qkvz"].T, part @ p["delta_ba"].T
        if net.by_key_head:
            q, k, v, z = (y.flatten(1) for y in qkvz.unflatten(1, (K, -1)).split((C, C, r * V, r * V), 2))
            b, a = (y.flatten(1) for y in ba.unflatten(1, (K, -1)).split((r, r), 2))
        else:
            q, k, v, z = qkvz.split((K * C, K * C, K * r * V, K * r * V), 1)
            b, a = ba.chunk(2, 1)
        before = F.pad(torch.cat((q, k, v), 1), (0, 0, net.width - 1, 0))
        taps = p["delta_conv"].squeeze(1).T
        mixed = F.silu(sum(before[tap : tap + len(part)] * taps[tap] for tap in range(net.width)))
        q, k, v = mixed.split((K * C, K * C, K * r * V), 1)
        q, k = (
            y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            for y in (q.unflatten(1, (K, C)), k.unflatten(1, (K, C)))
        )
        decay, beta = torch.exp(-p["a_log"].exp() * F.softplus(a + p["dt_bias"])), b.sigmoid()
        heads = []
        for h in range(K * r):
            state, rows = x.new_zeros(C, V), []
            for t in range(len(part)):
                key, value = k[t, h // r], v[t, h * V : (h + 1) * V]
                state = state * decay[t, h]
                state = state + torch.outer(key, beta[t, h] * (value - key @ state))
                rows.append(q[t, h // r] @ state * C**-0.5)
            rows = torch.stack(rows)
            normed = p["delta_norm"] * rows / (rows.square().mean(-1, keepdim=True) + net.eps).sqrt()
            heads.append(F.silu(z[:, h * V : (h + 1) * V]) * normed)
        outputs.append(torch.cat(heads, 1) @ p["delta_out"].T)
    return torch.cat(outputs)


@LAYOUTS
def test_against_a_loop_over_tokens_in_float64(by_key_head) -> None:
    net = DeltaNet.of(**ODD, by_key_head=by_key_head)
    p, mb = random_parameters(net, torch.float64), documents_of(DOCUMENTS)
    x, dy = torch.randn(2, len(mb.positions), net.qkvz.inputs, dtype=torch.float64)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in ({"x": x} | p).items()}
    y = by_loop(net, leaves, leaves["x"], DOCUMENTS[0])
    expected = dict(zip(leaves, torch.autograd.grad(y, leaves.values(), dy), strict=True)) | {"y": y}
    for name, found in both_ways(net, p, x, dy, mb).items():
        torch.testing.assert_close(
            found, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )
