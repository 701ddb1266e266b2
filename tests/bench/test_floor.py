"""The floor counts every product, attention and every elementwise byte once, in the passes that have them."""

import pytest
import torch

from rptrain.bench import clock, floor
from rptrain.kernels import grouped_fp8
from rptrain.models.families import registry
from rptrain.models.layer import Operation
from rptrain.models.layers import attention
from rptrain.models.layers.attention import Attention
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.freeze import freeze

from ..models.test_shapes import GPT_OSS, QWEN3_MOE, TINY

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch):
    """A product takes 1 s, attention 100 s, a byte that is moved 1e-9 s."""
    spent = [0.0]

    def spend(amount):
        spent[0] += amount

    def take(works, device, *, cold):
        taken = {}
        for name, work in works.items():
            before = spent[0]
            work()
            taken[name] = spent[0] - before
        return taken | ({"copy": floor.COPY / 1e9} if "copy" in works else {})

    timed = Operation("attention", lambda: spend(100.0), lambda: spend(100.0))
    monkeypatch.setattr(clock, "seconds", take)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: spend(1.0))
    monkeypatch.setattr(floor, "grouped_mm", lambda x, w, ends: spend(10.0))
    monkeypatch.setattr(floor, "grouped_weight_grad", lambda acc, x, dy, ends: spend(10.0))
    monkeypatch.setattr(Attention, "operations", lambda *_: [timed])
    monkeypatch.setattr(floor, "_move", lambda halves, nbytes: spend(nbytes / 1e9))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_block_by_hand(architecture, seconds, monkeypatch) -> None:
    monkeypatch.setattr(floor, "COPY", 1 << 10)
    spec = registry.build({**TINY, "architectures": [architecture]})
    found = floor.floor(spec, 2, 8, torch.float32, CPU)
    block, head = found.layers
    assert (block.name, block.count, head.count) == ("layers.0", len(spec.layers), 1)
    assert [(line.operation, line.forward, line.backward) for line in block.lines[:5]] == [
        ("qkv 24 x 100", 1, 2), ("o 60 x 24", 1, 2), ("gate_up 24 x 40", 1, 2), ("down 20 x 24", 1, 2),
        ("attention", 100, 100),
    ]  # fmt: skip
    forward, backward = (work.traffic / 1e9 for work in spec.layers[0].work(16, 8, 4))
    assert sum(line.forward for line in block.lines) == pytest.approx(104 + forward)
    assert sum(line.backward for line in block.lines) == pytest.approx(108 + backward)
    assert block.seconds() == pytest.approx(2 * (104 + forward) + 108 + backward)
    assert block.seconds(recompute=False) == pytest.approx(104 + forward + 108 + backward)
    forward, backward = (work.traffic / 1e9 for work in spec.head.work(16, 8, 4))
    assert head.seconds() == head.seconds(recompute=False) == pytest.approx(1 + forward + 2 + backward)
    assert found.tokens_per_second() == pytest.approx(16 / (block.count * block.seconds() + head.seconds()))
    assert found.tokens_per_second(recompute=False) > found.tokens_per_second()


@pytest.mark.parametrize(("config", "inner"), [(QWEN3_MOE, 7), (GPT_OSS, 20)], ids=["qwen3", "gpt-oss"])
def test_a_block_with_experts_by_hand(config, inner, seconds, monkeypatch) -> None:
    monkeypatch.setattr(floor, "COPY", 1 << 10)
    spec = registry.build(config)
    found = floor.floor(spec, 2, 8, torch.float32, CPU)
    assert [layer.count for layer in found.layers] == ([4, 1] if config is QWEN3_MOE else [2, 2, 1])
    assert [(line.operation, line.forward, line.backward) for line in found.layers[0].lines[:6]] == [
        ("qkv 24 x 100", 1, 2), ("o 60 x 24", 1, 2), ("router 24 x 5", 1, 2),
        (f"experts_gate_up 24 x {2 * inner} x 5", 10, 20), (f"experts_down {inner} x 24 x 5", 10, 20),
        ("attention", 100, 100),
    ]  # fmt: skip


def test_frozen_weights_have_no_gradient_and_their_layers_are_a_kind_of_their_own(seconds, monkeypatch) -> None:
    monkeypatch.setattr(floor, "COPY", 1 << 10)
    spec = freeze(registry.build(QWEN3_MOE), ["model.layers.1.*", "*.down_proj.weight"])
    found = floor.floor(spec, 2, 8, torch.float32, CPU)
    assert [(layer.name, layer.count) for layer in found.layers] == [("layers.0", 3), ("layers.1", 1), ("head", 1)]
    for layer, backward in zip(found.layers, ([10, 2, 2, 2, 20], [1, 1, 1, 10, 10]), strict=False):
        assert sorted(line.backward for line in layer.lines[:5]) == sorted(backward)


def test_the_products_of_experts_compute_what_they_stand_for(monkeypatch) -> None:
    seen = []
    product = floor.grouped_mm
    monkeypatch.setattr(floor, "grouped_mm", lambda x, w, ends: seen.append((x, w, ends)) or product(x, w, ends))
    w = torch.randn(3, 4, 5)
    forward, backward = floor._grouped(w, 8, True)
    assert forward().shape == (8, 5)
    backward()
    assert [(tuple(x.shape), tuple(w.shape)) for x, w, _ in seen] == [((8, 4), (3, 4, 5)), ((8, 5), (3, 5, 4))]
    assert all(ends.tolist() == [2, 5, 8] for _, _, ends in seen)


@pytest.mark.parametrize("config", [QWEN3_MOE, GPT_OSS], ids=["qwen3", "gpt-oss"])
def test_the_products_of_experts_in_fp8_by_hand(config, monkeypatch) -> None:
    """Of rows of 32 and 16 columns, with the weights' rows as they are stored: outputs, or inputs in GPT-OSS."""
    seen = []
    product, accumulate = grouped_fp8.product, grouped_fp8.accumulate
    monkeypatch.setattr(grouped_fp8, "product", lambda *given: seen.append(product(*given).shape))
    monkeypatch.setattr(grouped_fp8, "accumulate", lambda acc, *given: seen.append(accumulate(acc, *given) or acc))
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "intermediate_size": 16, "head_dim": 16}
    spec = with_fp8(registry.build(config | sizes))
    layer = spec.layers[0]
    operations = list(floor._products(spec, layer, 8, torch.bfloat16, CPU))
    gate_up, down = (operation for operation in operations if operation.name.startswith("experts"))
    assert (gate_up.name, down.name) == ("experts_gate_up 32 x 32 x 5", "experts_down 16 x 32 x 5")
    down.forward()
    down.backward()
    forward, backward, gradient = seen
    assert (forward, backward) == ((24, 32), (24, 16))
    assert gradient.shape == ((5, 32, 16) if config is QWEN3_MOE else (5, 16, 32))
    assert gradient.abs().amax((1, 2)).min() > 0


def test_a_move_reads_and_writes_the_bytes() -> None:
    halves = [torch.zeros(10, dtype=torch.uint8), torch.arange(1, 11, dtype=torch.uint8)]
    floor._move(halves, 13)
    assert halves[0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0]
    floor._move(halves, 27)  # as much as the halves hold, and 3 bytes more
    assert halves[0].tolist() == halves[1].tolist()


def test_the_products_compute_what_they_stand_for(monkeypatch) -> None:
    seen = {}
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.update({tuple(out.shape): (a @ b, out.copy_(a @ b))}))
    w, x, y = torch.randn(3, 5), torch.randn(7, 5), torch.empty(7, 3)
    forward, backward = floor._product(w, x, y, True)
    forward()
    assert torch.equal(y, x @ w.t())
    backward()
    assert torch.equal(seen[7, 5][1], y @ w) and torch.equal(seen[3, 5][1], y.t() @ x)


def test_the_quickest_attention_counts(monkeypatch) -> None:
    spec = registry.build({**TINY, "architectures": ["LlamaForCausalLM"]})
    monkeypatch.setattr(floor, "COPY", 1 << 10)
    slow, quick = Operation("slow", list, list), Operation("quick", list, list)
    monkeypatch.setattr(Attention, "operations", lambda *_: [slow, quick])
    taken = {("slow", "forward"): 2.0, ("slow", "backward"): 4.0, ("quick", "forward"): 1.0, ("quick", "backward"): 5.0}
    monkeypatch.setattr(clock, "seconds", lambda works, device, *, cold: {key: taken.get(key, 1.0) for key in works})
    lines = floor.floor(spec, 2, 8, torch.float32, CPU).layers[0].lines
    assert [line.forward for line in lines if line.operation == "quick"] == [1.0]
    assert not any(line.operation == "slow" for line in lines)


def attention_of(spec):
    return spec.layers[0].mixer.operations(floor._whole_sequences(2, 8, CPU), torch.float32, CPU)


def test_attention_runs_both_ways() -> None:
    spec = registry.build({**TINY, "architectures": ["LlamaForCausalLM"]})
    (operation,) = attention_of(spec)
    assert operation.name == "attention (reference)"
    out, _ = operation.forward()
    dq, dk, dv = operation.backward()
    assert out.shape == dq.shape == (16, 6, 10) and dk.shape == dv.shape == (16, 2, 10)


def test_attention_has_the_window_and_the_sinks(monkeypatch) -> None:
    calls = []
    for name in ("attention", "attention_backward"):
        real = getattr(attention.attn, name)

        def spy(*args, real=real, **extras):
            calls.append(extras)
            return real(*args, **extras)

        monkeypatch.setattr(attention.attn, name, spy)
    (operation,) = attention_of(registry.build(GPT_OSS))
    operation.forward()
    assert operation.backward()[0].shape == (16, 6, 10)
    assert [(extras["window"], extras["sinks"].shape) for extras in calls] == [(4, (6,))] * 3
    assert calls[-1]["grad_sinks"].abs().sum() > 0


def test_the_clock_counts_what_runs() -> None:
    counts = {"a": 0, "b": 0}

    def work(name):
        counts[name] += 1

    taken = clock.seconds({name: lambda name=name: work(name) for name in counts}, CPU, turns=5, cold=False)
    assert counts == {"a": 5, "b": 5} and all(value >= 0 for value in taken.values())
