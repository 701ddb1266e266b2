"""Float16 sums in attention and the head: which layers ask for them, and what plans count."""

import pytest
import torch

from rptrain.models.families.registry import build
from rptrain.models.layers import attention, head, product
from rptrain.models.transforms.half_sums import with_half_sums

from ...engine import plain

TOKENS, LENGTH = 64, 32


@pytest.mark.parametrize("config", [plain.CONFIG, plain.QWEN3_MOE, plain.GPT_OSS])
def test_every_layer_asks_for_them(config, monkeypatch):
    spec = with_half_sums(build(config))
    asked = []

    def recorded(*args, half_sums=False, **options):
        asked.append(half_sums)
        raise StopIteration

    monkeypatch.setattr(attention, "qk_norm_rope", recorded)
    monkeypatch.setattr(head, "linear_cross_entropy", recorded)
    monkeypatch.setattr(head, "linear_cross_entropy_backward", recorded)
    x, mb = torch.ones(4, spec.hidden_size), Batch()
    params = {"norm": torch.ones(spec.hidden_size), "embed": x, "head": x}
    for layer in spec.layers:
        weights = {param.name: torch.ones(param.shape) for unit in layer.units for param in spec.units[unit].params}
        with pytest.raises(StopIteration):
            layer.forward(weights, x, mb)
        with pytest.raises(StopIteration):
            layer.step(weights, x, None, Batch())
        assert asked.pop() is False  # decoding takes q, k and v in the model's type
    with pytest.raises(StopIteration):
        spec.head.loss(params, x, mb)
    with pytest.raises(StopIteration):
        spec.head.loss_backward(params, {}, x, mb, 1.0)
    assert asked == [True] * (len(spec.layers) + 2)


@pytest.mark.parametrize("config", [plain.CONFIG, plain.GPT_OSS])
def test_blocks_ask_for_them_in_gradients_of_weights(config, monkeypatch):
    asked = []
    for name in ("linear_backward", "accumulate_weight_grad"):
        monkeypatch.setattr(product, name, lambda *args, half_sums=False, **options: asked.append(half_sums))
    for spec in (build(config), with_half_sums(build(config))):
        o, x = spec.layers[0].mixer.o, torch.ones(4, 4)
        o.backward({"o": x}, {}, x, x, Batch())
        o.backward_weights({"o": x}, {}, product.OutputGrad(x, None), x, Batch())
    assert asked == [False, False, True, True]


class Batch:
    labels, rotations = None, (None,)


def test_work_and_memory_by_hand():
    """All of attention and of the head, for 16-bit models alone; a copy of dout, and a scale per head."""
    shape = plain.config(head_dim=64, num_attention_heads=8, num_key_value_heads=2)
    full, half = build(shape), with_half_sums(build(shape))
    for before, after in zip((full.layers[0], full.head), (half.layers[0], half.head), strict=True):
        assert before.work(TOKENS, LENGTH, 4) == after.work(TOKENS, LENGTH, 4)
        for plain_work, work in zip(before.work(TOKENS, LENGTH, 2), after.work(TOKENS, LENGTH, 2), strict=True):
            assert plain_work.half == plain_work.half_attention == plain_work.half_attention_backward == 0
            assert work.flops == plain_work.flops
            assert work.half_attention == work.attention
            assert work.half_attention_backward == work.attention_backward
            assert work.half == (work.matmul if after is half.head else 0)
    param = next(param for unit in half.head.units for param in half.units[unit].params if len(param.shape) == 2)
    left = half.head.work(TOKENS, LENGTH, 2)[1].without(half.head.gradient_work(param, TOKENS, 2))
    assert left.half == left.matmul == 2.0 * TOKENS * param.numel
    workspaces = [layer.workspace_bytes(TOKENS, 2, fused=True) for layer in (full.layers[0], half.layers[0])]
    assert workspaces[0] < workspaces[1] <= workspaces[0] + TOKENS * 8 * (2 * 64 + 4)
    kept = [layer.kept_bytes(TOKENS, 2) for layer in (full.layers[0], half.layers[0])]
    assert kept[1] - kept[0] == TOKENS * (8 + 2 + 2) * 4


def test_heads_that_are_too_large_keep_float32_sums():
    half = with_half_sums(build(plain.config(head_dim=256)))
    assert all(
        work.half_attention == work.half_attention_backward == 0 for work in half.layers[0].work(TOKENS, LENGTH, 2)
    )
