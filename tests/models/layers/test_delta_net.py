"""The gated delta net against transformers and against a loop over tokens, its documents, and its state."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from rptrain.kernels import delta_gradients, delta_rule, delta_scan
from rptrain.kernels.fp8 import Operand
from rptrain.kernels.launch import HAS_TRITON
from rptrain.kernels.reference.dense import wide
from rptrain.kernels.target import nvidia
from rptrain.models.layers.delta_net import DeltaNet
from rptrain.models.layers.state import CurrentTokens
from tests.models.conftest import make_micro_batch
from tests.models.layers.test_layers import LiveBytes

LAYOUTS = pytest.mark.parametrize("by_key_head", [False, True], ids=["by_kind", "by_key_head"])
DOCUMENTS = [[70, 1, 3, 31]]
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
    p = {name: torch.randn(shape, generator=generator).mul_(0.2).to(dtype) for name, shape in shapes(net).items()}
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
    torch.manual_seed(4)
    x, dy = torch.randn(2, len(mb.positions), net.qkvz.inputs, dtype=torch.float64)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in ({"x": x} | p).items()}
    y = by_loop(net, leaves, leaves["x"], DOCUMENTS[0])
    expected = dict(zip(leaves, torch.autograd.grad(y, leaves.values(), dy), strict=True)) | {"y": y}
    for name, found in both_ways(net, p, x, dy, mb).items():
        torch.testing.assert_close(
            found, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


@LAYOUTS
def test_against_transformers_in_float32(by_key_head) -> None:
    """Each document alone, of the classes whose products have the columns in this order."""
    from transformers import Qwen3_5TextConfig, Qwen3NextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    settings, cls = (
        (Qwen3NextConfig, Qwen3NextGatedDeltaNet) if by_key_head else (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet)
    )
    net = DeltaNet.of(24, 2, 6, 8, 5, 4, 1e-6, by_key_head=by_key_head)
    config = settings(
        hidden_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=4,
    )
    theirs, p = cls(config, 0), random_parameters(net, torch.float32)
    names = {"delta_conv": "conv1d.weight", "delta_norm": "norm.weight", "a_log": "A_log", "dt_bias": "dt_bias"}
    names |= {"delta_out": "out_proj.weight"}
    if by_key_head:
        names |= {"delta_qkvz": "in_proj_qkvz.weight", "delta_ba": "in_proj_ba.weight"}
        stored = {name: p[ours] for ours, name in names.items()}
    else:
        split = {"delta_qkvz": ("in_proj_qkv", "in_proj_z"), "delta_ba": ("in_proj_b", "in_proj_a")}
        stored = {name: p[ours] for ours, name in names.items()}
        for ours, (first, second) in split.items():
            rows = p[ours].split([len(p["delta_conv"]), 30] if ours == "delta_qkvz" else [6, 6])
            stored |= {f"{first}.weight": rows[0], f"{second}.weight": rows[1]}
    theirs.load_state_dict(stored)

    mb = documents_of(DOCUMENTS)
    torch.manual_seed(4)
    x, dy = torch.randn(2, len(mb.positions), 24)
    x.requires_grad_()
    y = torch.cat([theirs(document[None])[0] for document in x.split(DOCUMENTS[0])])
    y.backward(dy)
    found = both_ways(net, p, x.detach(), dy, mb)
    gradients = {name: tensor.grad for name, tensor in theirs.named_parameters()}
    expected = {"y": y.detach(), "x": x.grad} | {ours: gradients[name] for ours, name in names.items()}
    if not by_key_head:
        for ours, modules in split.items():
            expected[ours] = torch.cat([gradients[f"{module}.weight"] for module in modules])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), name


def exact_net(by_key_head):
    """A delta net, and parameters with which its products copy numbers: the order of their sums changes no bit.

    Each token has multiples of 32 numbers, which the CPU computes at a time: it rounds what is left in another way.
    """
    key_heads, heads, size = 32, 64, 2
    columns = 2 * key_heads * size + 2 * heads * size + 2 * heads
    net = DeltaNet.of(columns, key_heads, heads, size, size, 4, 1e-6, by_key_head=by_key_head)
    p = random_parameters(net, torch.float32)
    copies = torch.eye(columns)
    p |= {"delta_qkvz": copies[: net.qkvz.outputs], "delta_ba": copies[net.qkvz.outputs :]}
    return net, p | {"delta_out": copies[:, : net.out.inputs].contiguous()}


@LAYOUTS
def test_a_packed_document_has_the_bits_of_the_document_alone(by_key_head) -> None:
    net, p = exact_net(by_key_head)
    torch.manual_seed(4)
    x, dy = torch.randn(2, sum(DOCUMENTS[0]), net.qkvz.inputs)
    packed = both_ways(net, p, x, dy, documents_of(DOCUMENTS))
    start = 0
    for length in DOCUMENTS[0]:
        part = slice(start, start + length)
        alone = both_ways(net, p, x[part], dy[part], documents_of([[length]]))
        assert torch.equal(packed["y"][part], alone["y"]) and torch.equal(packed["x"][part], alone["x"])
        start += length


@LAYOUTS
@pytest.mark.parametrize("changed", [0, 2])
def test_changing_a_document_changes_nothing_of_the_others(changed, by_key_head) -> None:
    net = DeltaNet.of(**ODD, by_key_head=by_key_head)
    p, mb = random_parameters(net, torch.float32), documents_of(DOCUMENTS)
    torch.manual_seed(4)
    x, dy = torch.randn(2, len(mb.positions), net.qkvz.inputs)
    before = both_ways(net, p, x, dy, mb)
    start, stop = mb.cu_seqlens[changed : changed + 2].tolist()
    x[start:stop], dy[start:stop] = 1e3, float("inf")  # its gradients become NaN
    after = both_ways(net, p, x, dy, mb)
    for name in ("x", "y"):
        assert not torch.equal(after[name][start:stop], before[name][start:stop])
        assert torch.equal(after[name][:start], before[name][:start]), name
        assert torch.equal(after[name][stop:], before[name][stop:]), name


def current_tokens(starts, counts):
    """The next `counts` tokens of sequences after `starts` tokens."""
    positions = torch.cat([start + torch.arange(count) for start, count in zip(starts, counts, strict=True)])
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
    return CurrentTokens(
        positions=positions,
        sequence=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        cu_seqlens=cu_seqlens,
        ends=[start + count for start, count in zip(starts, counts, strict=True)],
        rotations=(),
        prompts=None if any(starts) else documents_of([counts]),
        single=all(count == 1 for count in counts),
    )


def states_are_equal(one, other) -> bool:
    return torch.equal(one.history, other.history) and torch.equal(one.matrices, other.matrices)


@LAYOUTS
def test_steps_of_decoding_continue_prompts(by_key_head) -> None:
    """Prompts, some shorter than the convolution, then a token of each sequence at a time."""
    net = DeltaNet.of(**ODD, by_key_head=by_key_head)
    p, prompts, steps = random_parameters(net, torch.float64), [66, 1, 2], 4
    torch.manual_seed(4)
    whole = [torch.randn(prompt + steps, 13, dtype=torch.float64) for prompt in prompts]
    expected = [net.forward(p, Operand(x.dtype, x), documents_of([[len(x)]]))[0] for x in whole]
    state = net.new_state(3, torch.float64, torch.device("cpu"))
    found, starts, counts = [[], [], []], [0, 0, 0], prompts
    for _ in range(steps + 1):
        x = torch.cat([x[start : start + count] for x, start, count in zip(whole, starts, counts, strict=True)])
        y = net.step(p, Operand(x.dtype, x), state, current_tokens(starts, counts))
        for rows, part in zip(found, y.split(counts), strict=True):
            rows.append(part)
        starts, counts = [start + count for start, count in zip(starts, counts, strict=True)], [1, 1, 1]
    for rows, y in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(rows), y, rtol=1e-12, atol=1e-12)
    assert state.nbytes == net.state_bytes(3, 70, torch.float64)
    narrow = net.new_state(3, torch.bfloat16, torch.device("cpu"))
    assert narrow.nbytes == net.state_bytes(3, 70, torch.bfloat16) and narrow.matrices.dtype == torch.float32


def test_a_conversation_appends_to_its_state_or_starts_again() -> None:
    net = DeltaNet.of(**ODD)
    p = random_parameters(net, torch.float64)
    torch.manual_seed(4)
    x = torch.randn(80, 13, dtype=torch.float64)
    whole = net.forward(p, Operand(x.dtype, x), documents_of([[80]]))[0]

    def step(state, start, stop):
        current = current_tokens([start], [stop - start])
        return net.step(p, Operand(x.dtype, x[start:stop]), state, current)

    state, fresh = (net.new_state(1, torch.float64, torch.device("cpu")) for _ in range(2))
    parts = [step(state, *part) for part in ((0, 5), (5, 6), (6, 76), (76, 80))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    assert state.keep(0, 80) == 80 and not states_are_equal(state, fresh)
    assert state.keep(0, 79) == 0 and states_are_equal(state, fresh) and state.keep(0, 0) == 0
    torch.testing.assert_close(step(state, 0, 5), whole[:5], rtol=1e-12, atol=1e-12)


def test_a_step_that_is_interrupted_leaves_no_state_to_continue() -> None:
    net, state = DeltaNet.of(**ODD), DeltaNet.of(**ODD).new_state(1, torch.float64, torch.device("cpu"))
    p, x = random_parameters(net, torch.float64), torch.randn(6, 13, dtype=torch.float64)
    net.step(p, Operand(x.dtype, x[:5]), state, current_tokens([0], [5]))
    net.step(p, Operand(x.dtype, x[5:]), state, current_tokens([5], [1]))  # and a later layer is interrupted
    assert state.keep(0, 5) == 0 == state.matrices.count_nonzero()


def test_work_by_hand() -> None:
    """D 13, 3 key heads of 5, 6 value heads of 7: 72 columns are convolved, and 42 normed."""
    net = DeltaNet.of(**ODD)
    forward, backward = net.work(10, 5, 2)
    with_state, in_chunks = 3 * 5 * 7, 64 * (5 + 5 + 7 + 7)
    assert forward.flops == forward.delta_rule == 2 * 10 * 6 * (with_state + in_chunks)
    assert backward.flops == backward.delta_rule_backward == 2 * forward.delta_rule
    assert forward.elementwise == {
        "convolution": 10 * 2 * (72 + 72),
        "gates": 10 * (2 * 12 + 4 * 12),
        "gated norm": 10 * 2 * 3 * 42,
    }
    assert backward.elementwise == {
        "convolution, backward": 10 * 2 * (2 + 3) * 72,
        "gates, backward": 10 * (2 * 24 + 4 * 12),
        "gated norm, backward": 10 * 2 * (3 + 5) * 42,
    }
    assert (forward.quantization, backward.quantization) == (0, 0)
    in_fp8 = net.with_products(lambda product: replace(product, in_fp8=True))
    assert in_fp8.work(10, 5, 2)[1].quantization == 10 * 42 * (2 + 1)  # the normed output again
    assert in_fp8.ba.work(10, 2)[0].quantization == 0  # its input is that of the product before it


class NotLaunched:
    """A kernel that computes nothing."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


@pytest.mark.skipif(not HAS_TRITON, reason="sizes of launches need Triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(2, 6, 32, 24), (1, 2, 20, 12), (1, 2, 128, 128)])
def test_memory_of_the_kernels_of_the_delta_rule(sizes, dtype, monkeypatch) -> None:
    """All that they allocate, without what they compute."""
    for module in (delta_scan, delta_gradients):
        for name, value in vars(module).items():
            if hasattr(value, "run") and hasattr(value, "__getitem__"):
                monkeypatch.setattr(module, name, NotLaunched())
    monkeypatch.setattr(delta_rule, "target_of", lambda device: nvidia(9, 0))
    key_heads, heads, size, columns = sizes
    net, tokens, itemsize = DeltaNet.of(32, *sizes, 4, 1e-6), 128, dtype.itemsize
    mb = documents_of([[70, 58]])
    q, k = torch.zeros(2, tokens, key_heads, size, dtype=dtype)
    v = torch.zeros(tokens, heads, columns, dtype=dtype)
    decay, beta = torch.zeros(2, tokens, heads)
    operands, documents = (q, k, v, decay, beta), mb.documents
    kept = delta_rule.forward_triton(*operands, documents, None, final=False)[2]
    assert net.rule_kept_bytes(tokens, itemsize) == sum(tensor.nbytes for tensor in kept)
    with LiveBytes() as live:
        delta_rule.backward_triton(v, *operands, kept, documents)
    assert live.peak <= tokens * delta_rule.workspace_bytes(*sizes, itemsize) <= 1.05 * live.peak


@pytest.mark.parametrize("sizes", [(32, 8, 32, 8, 8, 4), (32, 1, 4, 64, 64, 4)])
def test_backward_needs_no_more_than_its_workspace(sizes) -> None:
    net = DeltaNet.of(*sizes, 1e-6)
    p, mb = random_parameters(net, torch.bfloat16), documents_of([[64] * 4])
    x, dy = torch.randn(2, 256, 32).bfloat16()
    saved = net.forward(p, Operand(x.dtype, x), mb)[1]
    with LiveBytes() as live:
        net.backward(p, accumulators(p), saved, dy, mb)
    assert live.peak <= 256 * sum(net.workspace(2, fused=False)) <= 2 * live.peak


def test_the_rule_is_timed_both_ways() -> None:
    net, mb = DeltaNet.of(**ODD), documents_of([[70], [70]])
    (operation,) = net.operations(mb, torch.float32, torch.device("cpu"))
    assert operation.forward()[0].shape == (140, 6, 7)
    dq, dk, dv, ddecay, dbeta = operation.backward()
    assert dq.shape == dk.shape == (140, 3, 5) and dv.shape == (140, 6, 7) and ddecay.shape == dbeta.shape == (140, 6)
    assert all(x.isfinite().all() for x in (dq, dk, dv, ddecay, dbeta))
