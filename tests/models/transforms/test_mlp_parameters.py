"""Adapters of dense MLPs and shared experts, in models with experts, by the names of their weights."""

from dataclasses import replace

import pytest
import torch

from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.lora import LoRA, adapted, target_names, with_lora
from tests.cases import grid
from tests.models.layers.test_layers import LiveBytes, assert_memory_bounds
from tests.models.transforms.test_lora import (
    LABELS,
    assert_like_peft,
    assert_recomputing_changes_no_bit,
    batch,
    fresh_lora,
    in_ours,
    in_peft,
)

GLM = "Glm4MoeForCausalLM"
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
DENSE = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
SHARED = tuple(name.replace("mlp.", "mlp.shared_experts.") for name in DENSE)
EVERYTHING = LoRA(r=3, lora_alpha=5, target_parameters=(*EXPERTS, *DENSE, *SHARED))


@pytest.mark.parametrize(
    ("checkpoint", "settings"),
    [
        pytest.param("glm4-moe", EVERYTHING, id="everything"),
        grid("glm4-moe", LoRA(r=4, target_modules=("k_proj",), target_parameters=DENSE[1:]), id="dense"),
        pytest.param("glm4-moe-dense", LoRA(r=2, target_parameters=DENSE), id="all-dense"),
        pytest.param("glm4-moe-dense", LoRA(r=2), id="attention"),
        pytest.param(
            "glm4-moe-groups",
            LoRA(r=1, use_rslora=True, target_modules=(), target_parameters=("gate_proj.weight", SHARED[2])),
            id="two-shared",
        ),
        pytest.param(
            "qwen3-moe-some-dense",
            LoRA(r=2, target_modules=("q_proj",), target_parameters=("up_proj.weight", "down_proj", DENSE[2])),
            id="qwen3-moe",
        ),
    ],
    indirect=["checkpoint"],
)
def test_logits_loss_and_every_gradient_are_those_of_peft(checkpoint, settings, native, micro_batch) -> None:
    model, directory = checkpoint
    base = native(directory)
    theirs, trained = in_peft(model, settings, target_names(with_lora(base.spec, settings)))
    ours = in_ours(base, settings, trained)
    assert_like_peft(ours, theirs, trained, micro_batch(ours.spec, [[11], [11]], LABELS))


def test_a_name_means_the_weights_that_it_ends(fresh) -> None:
    """Layer 0 is dense, layer 1 has experts and a shared one."""
    spec = fresh(GLM).spec
    at = ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts")
    for name, modules in (
        ("mlp.gate_proj.weight", [f"{at[0]}.gate_proj"]),
        ("shared_experts.gate_proj.weight", [f"{at[1]}.gate_proj"]),
        ("gate_proj.weight", [f"{at[0]}.gate_proj", f"{at[1]}.gate_proj"]),
        ("model.layers.0.mlp.down_proj.weight", [f"{at[0]}.down_proj"]),
        ("down_proj", []),  # the experts' parameter alone
    ):
        found = with_lora(spec, LoRA(target_modules=("q_proj",), target_parameters=(name,)))
        assert [module for module in adapted(found) if "mlp" in module] == modules
        assert target_names(found) == ["q_proj"]
    assert not any("mlp" in module for module in adapted(with_lora(spec, LoRA())))


@pytest.mark.parametrize("dtype", [grid(torch.float32), torch.bfloat16])
def test_saving_and_recomputing_change_no_bit(dtype, fresh, micro_batch) -> None:
    model = fresh_lora(fresh, dtype, EVERYTHING, GLM)
    assert_recomputing_changes_no_bit(model, batch(micro_batch, model.spec, dtype))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", [grid(torch.float32), torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [grid((64, 160, 1, 4, 5)), grid((96, 32, 2, 9, 5)), grid((128, 32, 4, 64, 30)), (64, 32, 20, 3, 5)]
)
def test_bounds_of_memory_hold(fp8, dtype, sizes, fresh, micro_batch) -> None:
    """In FP8 the bound includes gradients of weights, which are frozen here."""
    hidden, intermediate, shared, r, experts = sizes
    model = fresh_lora(
        fresh,
        dtype,
        replace(EVERYTHING, r=r),
        GLM,
        hidden_size=hidden,
        intermediate_size=4 * intermediate,
        moe_intermediate_size=intermediate,
        n_routed_experts=experts,
        n_shared_experts=shared,
        head_dim=64,
    )
    tokens, itemsize = 512, dtype.itemsize
    torch.manual_seed(6)
    mb = micro_batch(model.spec, [[2]] * 256, torch.randint(61, (tokens,)))
    spec = with_fp8(model.spec) if fp8 else model.spec
    for layer in spec.layers:
        p, g = model.of(layer, model.params), model.of(layer, model.grads)
        for param in (param for unit in layer.units for param in spec.units[unit].params if param.in_fp8):
            weight = p[param.name]
            p[param.name] = param.fp8_view(torch.empty(param.fp8_bytes(columns=True), dtype=torch.uint8), columns=True)
            p[param.name].write(weight)
        x, dy = (torch.randn(tokens, hidden).to(dtype) for _ in range(2))
        if not fp8:
            assert_memory_bounds(layer, p, g, x, dy, mb)
            continue
        with LiveBytes() as live:
            saved = layer.forward_saved(p, x, mb)[1]
            assert live.now + x.nbytes == layer.kept_bytes(tokens, itemsize)
        with LiveBytes() as live:
            layer.backward(p, g, saved, dy, mb)
        assert live.peak <= layer.workspace_bytes(tokens, itemsize)


def test_work_by_hand(fresh) -> None:
    """D 24, dense I 20, shared I 7; rank 2, with one gate less."""
    spec = fresh(GLM).spec
    adapted = with_lora(spec, LoRA(r=2, target_modules=(), target_parameters=("up_proj.weight", "down_proj.weight")))
    for plain, layer, width in zip(spec.layers, adapted.layers, (20, 7), strict=True):
        low, high = 2 * 10 * 2 * (24 + width), 2 * 10 * 2 * (width + 24)
        before, after = plain.work(10, 5, 2), layer.work(10, 5, 2)
        assert after[0].matmul - before[0].matmul == low + high
        # the product with A again, the gradients of both products' inputs and of both weights
        assert after[1].matmul - before[1].matmul == 3 * low + 2 * high
        for ahead in (False, True):
            moved = 2 * (24 + width)  # added to the product, or to the gradient of its input
            assert after[not ahead].traffic - before[not ahead].traffic == 10 * 2 * moved
        assert layer.kept_bytes(10, 2) == plain.kept_bytes(10, 2)
