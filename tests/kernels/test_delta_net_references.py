"""A gated delta net's references against transformers' layer and against autograd in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rptrain.kernels.causal_conv import causal_conv, causal_conv_backward, causal_conv_from, last_inputs
from rptrain.kernels.delta_gates import gates, gates_backward
from rptrain.kernels.gated_norm import gated_norm, gated_norm_backward

from .delta_net import Sizes, positions_of, product, views
from .exact import dtypes, random

SIZES = Sizes(heads=2, repeat=3, columns=6, values=5, width=4)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DOUBLE = torch.float64


@dtypes
def test_as_in_transformers(dtype, monkeypatch) -> None:
    """The layer's inputs of the delta rule, and its output, with weights of ours."""
    from transformers.models.qwen3_5 import Qwen3_5TextConfig, modeling_qwen3_5

    config = Qwen3_5TextConfig(
        hidden_size=8, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=6,
        linear_value_head_dim=5, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    make_layer: Any = modeling_qwen3_5.Qwen3_5GatedDeltaNet  # annotated with the config of the whole model
    layer = make_layer(config, 0).to(dtype)
    with torch.no_grad():
        layer.norm.weight.copy_(random((5,), dtype, "cpu"))
        layer.dt_bias.copy_(random((6,), dtype, "cpu", 1))
    given: dict[str, Tensor] = {}
    out = random((1, 7, 6, 5), dtype, "cpu", 2)

    def delta_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **rest: object):
        given.update(q=modeling_qwen3_5.l2norm(q), k=modeling_qwen3_5.l2norm(k), v=v, g=g, beta=beta)
        return out, None

    normed: list[Tensor] = []
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", delta_rule)
    layer.norm.register_forward_hook(lambda module, args, result: normed.append(result))
    x = random((1, 7, 8), dtype, "cpu", 3)
    with torch.no_grad():
        layer(x)

    flat, unit = x[0], TOLERANCES[dtype]
    qkvz = torch.cat((flat @ layer.in_proj_qkv.weight.T, flat @ layer.in_proj_z.weight.T), 1).detach()
    q, k, v, z = views(qkvz, SIZES, by_head=False)
    ours = causal_conv(q, k, v, layer.conv1d.weight.detach(), torch.arange(7))
    for one, other in zip(ours, (given["q"], given["k"], given["v"]), strict=True):
        torch.testing.assert_close(one.flatten(), other.flatten(), rtol=unit, atol=unit)
    b, a = ((flat @ p.weight.T).detach().view(7, 2, 3) for p in (layer.in_proj_b, layer.in_proj_a))
    decay, beta = gates(b, a, layer.A_log.detach().float(), layer.dt_bias.detach().float())
    torch.testing.assert_close(decay, given["g"][0].float(), rtol=1e-5, atol=1e-5)
    assert decay.dtype == torch.float32 and torch.equal(beta, given["beta"][0].float())
    y = gated_norm(out[0], z, layer.norm.weight.detach(), config.rms_norm_eps)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(y.flatten(), normed[0].flatten(), rtol=unit, atol=unit)


def conv_by_document(x: Tensor, weight: Tensor, documents: list[int], norm: bool) -> Tensor:
    """torch's convolution of each document [tokens, K, C]."""
    parts = []
    for part in x.split(documents):
        line = torch.nn.functional.pad(part.flatten(1).T, (weight.shape[-1] - 1, 0))
        conv = torch.nn.functional.conv1d(line[None], weight, groups=len(line))[0].T.reshape(part.shape)
        y = torch.nn.functional.silu(conv)
        parts.append(y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() if norm else y)
    return torch.cat(parts)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(("documents", "width"), [([1, 6, 2, 3], 4), ([1], 4), ([5, 1, 1], 2)])
def test_convolution_has_the_gradients_of_autograd(documents, width, by_head) -> None:
    sizes, tokens = Sizes(2, 3, 6, 5, width), sum(documents)
    qkvz = product(tokens, sizes, DOUBLE, "cpu").requires_grad_()
    weight = random((sizes.channels, 1, width), DOUBLE, "cpu", 1).requires_grad_()
    parts = views(qkvz, sizes, by_head)[:3]
    weights = weight.split([part.shape[1] * part.shape[2] for part in parts])
    norms = True, True, False
    theirs = [conv_by_document(x, w, documents, norm) for x, w, norm in zip(parts, weights, norms, strict=True)]
    dys = [random(tuple(y.shape), DOUBLE, "cpu", i + 2) for i, y in enumerate(theirs)]
    dqkvz, dweight = torch.autograd.grad(theirs, (qkvz, weight), dys)

    positions = positions_of(documents, "cpu")
    inputs = *(views(qkvz.detach(), sizes, by_head)[:3]), weight.detach(), positions
    ours = causal_conv(*inputs)
    torch.testing.assert_close(list(ours), theirs)
    assert all(y.is_contiguous() for y in ours)
    grad, grad_w = torch.zeros_like(dqkvz), torch.ones_like(dweight)
    q, k, v, _ = views(grad, sizes, by_head)
    dv = dys[2].view(tokens, 6, 5)
    causal_conv_backward(dys[0], dys[1], dv, *inputs, (q, k, v), grad_w)
    torch.testing.assert_close(grad, dqkvz)
    torch.testing.assert_close(grad_w - 1, dweight)


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_continues_after_its_last_inputs(width) -> None:
    """Documents in parts, of which some are empty and some shorter than the convolution."""
    sizes, lengths = Sizes(2, 1, 6, 5, width), [[3, 0, 1], [1, 2, 1], [1, 1, 1], [0, 5, 1]]
    documents = [sum(part[i] for part in lengths) for i in range(3)]
    whole = product(sum(documents), sizes, DOUBLE, "cpu")
    weight = random((sizes.channels, 1, width), DOUBLE, "cpu", 1)
    qkv = views(whole, sizes, False)[:3]
    expected = [y.split(documents) for y in causal_conv(*qkv, weight, positions_of(documents, "cpu"))]
    left, done, history = [x.split(documents) for x in qkv], [0, 0, 0], None
    for part in lengths:
        spans = [slice(start, start + length) for start, length in zip(done, part, strict=True)]
        q, k, v = (torch.cat([x[i][span] for i, span in enumerate(spans)]) for x in left)
        cu_seqlens = torch.tensor([0, *torch.tensor(part).cumsum(0)], dtype=torch.int32)
        if history is None:
            ours = causal_conv(q, k, v, weight, positions_of(part, "cpu"))
        else:
            ours = causal_conv_from(q, k, v, weight, history, cu_seqlens)
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, torch.cat([other[i][span] for i, span in enumerate(spans)]))
        history = last_inputs(q, k, v, width, cu_seqlens, history)
        assert history.shape == (3, sizes.channels, width - 1)
        done = [span.stop for span in spans]


def test_gates_have_the_gradients_of_autograd() -> None:
    ba = random((5, 2, 6), DOUBLE, "cpu").requires_grad_()
    a_log, dt_bias = (random((6,), DOUBLE, "cpu", seed).requires_grad_() for seed in (1, 2))
    b, a = ba.split(3, -1)
    theirs = -a_log.exp() * torch.nn.functional.softplus(a.reshape(5, 6) + dt_bias), b.reshape(5, 6).sigmoid()
    dys = [random((5, 6), DOUBLE, "cpu", seed) for seed in (3, 4)]
    expected = torch.autograd.grad(theirs, (ba, a_log, dt_bias), dys)

    inputs = b.detach(), a.detach(), a_log.detach(), dt_bias.detach()
    torch.testing.assert_close(gates(*inputs), theirs)
    grad, sums = torch.zeros_like(ba), [torch.ones(6, dtype=DOUBLE) for _ in range(2)]
    db, da = grad.split(3, -1)
    gates_backward(dys[0], dys[1], *inputs, (db, da), (sums[0], sums[1]))
    torch.testing.assert_close([grad, sums[0] - 1, sums[1] - 1], list(expected))


@pytest.mark.parametrize("by_head", [False, True])
def test_gated_norm_has_the_gradients_of_autograd(by_head) -> None:
    qkvz, weight = product(5, SIZES, DOUBLE, "cpu").requires_grad_(), random((5,), DOUBLE, "cpu", 1).requires_grad_()
    x, dy = random((5, 6, 5), DOUBLE, "cpu", 2).requires_grad_(), random((5, 30), DOUBLE, "cpu", 3)
    z = views(qkvz, SIZES, by_head)[3]
    theirs = torch.nn.functional.silu(z.reshape(5, 6, 5)) * torch.nn.functional.rms_norm(x, (5,), weight, 1e-3)
    dx, dqkvz, dweight = torch.autograd.grad(theirs.flatten(1), (x, qkvz, weight), dy)

    inputs = x.detach(), z.detach(), weight.detach(), 1e-3
    torch.testing.assert_close(gated_norm(*inputs), theirs.flatten(1))
    grad, sums = torch.zeros_like(dqkvz), torch.ones_like(dweight)
    ours = gated_norm_backward(dy, *inputs, views(grad, SIZES, by_head)[3], sums)
    torch.testing.assert_close([ours, grad, sums - 1], [dx, dqkvz, dweight])
