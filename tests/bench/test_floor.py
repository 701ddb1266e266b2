"""The floor counts every product, attention and every elementwise byte once, in the passes that have them."""

import pytest
import torch

from rptrain.bench import clock, floor
from rptrain.models import registry

from ..models.test_shapes import TINY

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch):
    """Every work takes a second; a copy, its bytes over 1e9."""

    def take(works, device, *, cold):
        for work in works.values():
            work()
        return {name: floor.COPY / 1e9 if name[0] == "copy" else 1.0 for name in works}

    monkeypatch.setattr(clock, "seconds", take)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_block_by_hand(architecture, seconds, monkeypatch) -> None:
    monkeypatch.setattr(floor, "COPY", 1 << 10)
    spec = registry.build({**TINY, "architectures": [architecture]})
    found = floor.floor(spec, 2, 8, torch.float32, CPU)
    block, head = found.layers
    assert (block.name, block.count, head.count) == ("layers.0", len(spec.layers), 1)
    assert [line.operation for line in block.lines[:5]] == [
        "qkv 24 x 100", "o 60 x 24", "gate_up 24 x 40", "down 20 x 24", "attention (reference)",
    ]  # fmt: skip
    forward, backward = (work.traffic / 1e9 for work in spec.layers[0].work(16, 8, 4))
    assert block.forward == pytest.approx(5 + forward) and block.backward == pytest.approx(5 + backward)
    assert block.seconds() == pytest.approx(15 + 2 * forward + backward)
    assert block.seconds(recompute=False) == pytest.approx(10 + forward + backward)
    forward, backward = (work.traffic / 1e9 for work in spec.head.work(16, 8, 4))
    assert head.seconds() == head.seconds(recompute=False) == pytest.approx(2 + forward + backward)
    step = block.count * block.seconds() + head.seconds()
    assert found.tokens_per_second() == pytest.approx(16 / step)
    assert found.tokens_per_second(recompute=False) > found.tokens_per_second()


def test_the_products_compute_what_they_stand_for(monkeypatch) -> None:
    seen = {}
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.update({tuple(out.shape): (a @ b, out.copy_(a @ b))}))
    w, x, y = torch.randn(3, 5), torch.randn(7, 5), torch.empty(7, 3)
    forward, backward = floor._product(w, x, y)
    forward()
    assert torch.equal(y, x @ w.t())
    backward()
    assert torch.equal(seen[7, 5][1], y @ w) and torch.equal(seen[3, 5][1], y.t() @ x)


def test_the_quickest_attention_counts(monkeypatch) -> None:
    spec = registry.build({**TINY, "architectures": ["LlamaForCausalLM"]})
    monkeypatch.setattr(floor, "COPY", 1 << 10)
    slow, quick = floor._Operation("slow", list, list), floor._Operation("quick", list, list)
    monkeypatch.setattr(floor, "_attention", lambda *_: [slow, quick])
    taken = {("slow", "forward"): 2.0, ("slow", "backward"): 4.0, ("quick", "forward"): 1.0, ("quick", "backward"): 5.0}
    monkeypatch.setattr(clock, "seconds", lambda works, device, *, cold: {key: taken.get(key, 1.0) for key in works})
    lines = floor.floor(spec, 2, 8, torch.float32, CPU).layers[0].lines
    assert [line.forward for line in lines if line.operation == "quick"] == [1.0]
    assert not any(line.operation == "slow" for line in lines)


def test_the_clock_counts_what_runs() -> None:
    counts = {"a": 0, "b": 0}

    def work(name):
        counts[name] += 1

    taken = clock.seconds({name: lambda name=name: work(name) for name in counts}, CPU, turns=5, cold=False)
    assert counts == {"a": 5, "b": 5} and all(value >= 0 for value in taken.values())
