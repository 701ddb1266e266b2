"""Adapters of experts against PEFT on transformers, and against autograd; what their work and memory are."""

from dataclasses import replace

import pytest
import torch

from rptrain.models.transforms.lora import LoRA, adapted, merged, target_names, with_lora, without_adapters
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError
from tests.models.conftest import Native
from tests.models.layers.test_layers import EVERY_EXPERT, assert_memory_bounds, to_cuda
from tests.models.transforms.test_lora import (
    IDS,
    LABELS,
    assert_like_peft,
    assert_recomputing_changes_no_bit,
    batch,
    fresh_lora,
    in_ours,
    in_peft,
)

GATE_UP, DOWN = BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SETTINGS = {
    "both-attention": LoRA(r=4, lora_alpha=8, target_parameters=BOTH),
    "both-odd-rslora": LoRA(r=3, lora_alpha=5, use_rslora=True, target_modules=(), target_parameters=BOTH),
    "gate-and-up": LoRA(r=2, target_modules=("o_proj",), target_parameters=("experts.gate_up_proj",)),
    "down-rank-one": LoRA(r=1, target_modules=(), target_parameters=("down_proj",), modules_to_save=("model.norm",)),
    "one-layer-of-two-kinds": LoRA(r=3, target_modules=(), target_parameters=(f"model.layers.1.{GATE_UP}", DOWN)),
}
settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
ARCHITECTURES = pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "checkpoint",
    ["qwen3-moe", "qwen3-moe-some-dense", "gpt-oss", "minimax-m2", "qwen3.5-moe", "qwen3-next-some-dense"],
    indirect=True,
)
@settings
def test_logits_loss_and_every_gradient_are_those_of_peft(checkpoint, settings, native, micro_batch) -> None:
    model, directory = checkpoint
    base = native(directory)
    theirs, trained = in_peft(model, settings, target_names(with_lora(base.spec, settings)))
    ours = in_ours(base, settings, trained)
    assert_like_peft(ours, theirs, trained, micro_batch(ours.spec, [[11], [11]], LABELS))


@ARCHITECTURES
def test_gradients_against_autograd_in_float64(architecture, fresh, micro_batch) -> None:
    """Of the merged model's weights: an adapter's are its factors times those of the weight."""
    model = fresh_lora(fresh, torch.float64, SETTINGS["both-odd-rslora"], architecture)
    mb = batch(micro_batch, model.spec, torch.float64)
    loss = model.backward(IDS, mb, scale=0.7)
    own = Native(without_adapters(model.spec), torch.float64)
    own.spec = replace(own.spec, units=tuple(replace(unit, trainable=True) for unit in own.spec.units))
    own.grads = [unit.views(torch.zeros(unit.numel, dtype=torch.float64)) for unit in own.spec.units]
    whole = merged(model.spec, model.view)
    for unit, params in enumerate(own.params):
        for name, tensor in params.items():
            tensor.copy_(whole(unit, name))
    torch.testing.assert_close(own.backward(IDS, mb, scale=0.7), loss, rtol=1e-12, atol=0)
    for layer in model.spec.layers:
        first, last = layer.units
        for product in layer.expert_products:
            adapters = product.adapters
            if adapters is None:
                continue
            p, g = model.params[last], model.grads[last]
            of_weight = product.whole(own.grads[first][adapters.name])  # [E, in, out]
            low = p[adapters.a].unflatten(0, (product.experts, -1))
            high = p[adapters.b].unflatten(1, (-1, product.experts))
            for ours, theirs in (
                (g[adapters.a], torch.einsum("eio,ore->eri", of_weight, high).flatten(0, 1)),
                (g[adapters.b], torch.einsum("eio,eri->ore", of_weight, low).flatten(1)),
            ):
                torch.testing.assert_close(ours, adapters.scale * theirs, rtol=1e-9, atol=1e-11)


@ARCHITECTURES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_recomputing_change_no_bit(architecture, dtype, fresh, micro_batch) -> None:
    model = fresh_lora(fresh, dtype, LoRA(r=3, lora_alpha=50, target_parameters=BOTH), architecture)
    assert_recomputing_changes_no_bit(model, batch(micro_batch, model.spec, dtype))


@ARCHITECTURES
def test_a_fresh_adapter_is_that_of_peft_and_adds_nothing(architecture, fresh, micro_batch) -> None:
    base = fresh(architecture, hidden_size=64)
    model = Native(with_lora(base.spec, LoRA(r=8, target_parameters=BOTH)), torch.float32)
    for ours, theirs in zip(model.params, base.params, strict=False):
        for name, tensor in theirs.items():
            ours[name].copy_(tensor)
    pretrained.initialize(model.spec, model.view, seed=5, units=range(len(base.spec.units), len(model.spec.units)))
    tensors = model.tensors(model.params)
    found = {name: tensor for name, tensor in tensors.items() if "experts" in name and "lora" in name}
    assert len(found) == 8
    for name, tensor in found.items():
        bound = 0 if "lora_B" in name else tensor.shape[1] ** -0.5  # kaiming_uniform_ with a = sqrt(5)
        assert 0.9 * bound <= tensor.abs().max() <= bound
    mb = batch(micro_batch, model.spec)
    assert torch.equal(model.logits(IDS, mb), base.logits(IDS, mb))


def test_modules_for_peft_are_without_experts(fresh) -> None:
    spec = with_lora(fresh("GptOssForCausalLM").spec, SETTINGS["gate-and-up"])
    assert adapted(spec) == [f"model.layers.{index}.self_attn.o_proj" for index in range(2)]
    assert target_names(spec) == ["o_proj"]
    with pytest.raises(UserError, match="match nothing that can have an adapter"):
        with_lora(fresh("LlamaForCausalLM").spec, LoRA(target_modules=()))


@pytest.mark.sample(6)
@ARCHITECTURES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 160, 4, 2, 4, 5), (96, 24, 4, 1, 9, 5), (128, 24, 1, 1, 64, 30)])
def test_bounds_of_memory_hold(architecture, dtype, sizes, fresh, micro_batch) -> None:
    hidden, intermediate, heads, kv_heads, r, experts = sizes
    model = fresh_lora(
        fresh,
        dtype,
        LoRA(r=r, target_modules=(), target_parameters=BOTH),
        architecture,
        hidden_size=hidden,
        intermediate_size=intermediate,
        moe_intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_experts=experts,
        num_local_experts=experts,
        head_dim=64,
    )
    tokens, itemsize = 512, dtype.itemsize
    torch.manual_seed(6)
    mb = micro_batch(model.spec, [[2]] * 256, torch.randint(61, (tokens,)))
    layer = model.spec.layers[0]
    p, g = model.of(layer, model.params), model.of(layer, model.grads)
    x, dy = (torch.randn(tokens, hidden).to(dtype) for _ in range(2))
    bare = layer.with_products(lambda product: replace(product, adapters=None))
    assert layer.kept_bytes(tokens, itemsize) == bare.kept_bytes(tokens, itemsize)
    assert_memory_bounds(layer, p, g, x, dy, mb)


def test_work_by_hand(fresh) -> None:
    """D 24, I 7, 3 of 5 experts; rank 2: 10 tokens are 30 rows, of products [24, 14] and [7, 24]."""
    spec = fresh("Qwen3MoeForCausalLM").spec
    layer = with_lora(spec, LoRA(r=2, target_modules=(), target_parameters=BOTH)).layers[0]
    plain, adapted = spec.layers[0].work(10, 5, 2), layer.work(10, 5, 2)
    low, high = 2 * 30 * 2 * (24 + 7), 2 * 30 * 2 * (14 + 24)
    assert adapted[0].grouped - plain[0].grouped == low + high
    # the product with A again, the gradients of both products' inputs and of both weights
    assert adapted[1].grouped - plain[1].grouped == 3 * low + 2 * high
    b = 5 * 2 * (14 + 24)
    assert adapted[0].traffic - plain[0].traffic == 2 * (2 * 30 * (14 + 24) + 2 * b)  # added to; B laid out by expert
    # added to the input's gradient; B once more, and its float32 sums: zeros, written over, read, added to its gradient
    assert adapted[1].traffic - plain[1].traffic == 2 * (2 * 30 * (24 + 7) + 2 * b) + 4 * 6 * b


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("architecture", "parameters"),
    [
        ("Qwen3MoeForCausalLM", BOTH),
        ("GptOssForCausalLM", BOTH),
        ("Glm4MoeForCausalLM", (*BOTH, "gate_proj.weight", "up_proj.weight", "down_proj.weight")),
    ],
)
def test_cuda_follows_float64_and_never_waits(architecture, parameters, fresh, micro_batch) -> None:
    lora = LoRA(r=8, lora_alpha=12, target_parameters=parameters)
    model, exact = (
        fresh_lora(fresh, dtype, lora, architecture, head_dim=16, **EVERY_EXPERT)
        for dtype in (torch.bfloat16, torch.float64)
    )
    for unit, source in zip(exact.params, model.params, strict=True):
        for name, tensor in unit.items():
            tensor.copy_(source[name])
    expected = exact.backward(IDS, batch(micro_batch, exact.spec, torch.float64))
    on_cuda, ids = to_cuda(model, batch(micro_batch, model.spec)), IDS.cuda()
    loss = model.backward(ids, on_cuda)
    found = {name: gradient.double().cpu() for name, gradient in model.gradients().items()}
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=0.1, atol=0)
    for name, theirs in exact.gradients().items():
        assert (found[name] - theirs).norm() <= 0.1 * theirs.norm(), name
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.backward(ids, on_cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
