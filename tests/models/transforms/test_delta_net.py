"""Adapters, FP8 and quantization of a gated delta net's products, and what it keeps with them."""

from dataclasses import replace

import pytest
import torch

from rptrain.kernels.fp8 import FP8Weight
from rptrain.kernels.reference.dense import wide
from rptrain.models.families import decoder
from rptrain.models.families.config import Shape
from rptrain.models.layers.delta_net import DeltaNet
from rptrain.models.layers.mlp import MLP
from rptrain.models.params import CheckpointPart, Param, Unit
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.half_sums import with_half_sums
from rptrain.models.transforms.lora import LoRA, adapted, merged, with_lora
from rptrain.models.transforms.quantize import with_base
from tests.models.conftest import Native, make_micro_batch
from tests.models.layers.test_kept_bytes import parameters, storage_bytes

AT = "model.layers.0.linear_attn"
MODULES = [f"{AT}.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")]
NET = DeltaNet.of(32, key_heads=4, value_heads=8, key_size=8, value_size=6, width=4, eps=1e-6)
TOKENS = 80
DOCUMENTS = [[70, 10]]


def spec_with(net=NET, hidden=32):
    """A model with one block, whose mixer is the delta net."""
    sizes = Shape(61, hidden, 48, 1, 1, 1, hidden, 1e-6, 0.2, tied=False, padding_row=None, rotaries=())
    values, channels = net.out.inputs, net.qkvz.outputs - net.out.inputs
    at, mlp = "model.layers.0", MLP.of(hidden, 48)
    qkvz = (f"{AT}.in_proj_qkv", channels), (f"{AT}.in_proj_z", values)
    ba = (f"{AT}.in_proj_b", net.value_heads), (f"{AT}.in_proj_a", net.value_heads)
    unit = Unit(
        "layers.0",
        (
            decoder.norm("input_norm", f"{at}.input_layernorm", hidden),
            decoder.matrix("delta_qkvz", hidden, 0.2, *qkvz),
            decoder.matrix("delta_ba", hidden, 0.2, *ba),
            Param("delta_conv", (channels, 1, net.width), (CheckpointPart(f"{AT}.conv1d.weight", channels),)),
            decoder.norm("delta_norm", f"{AT}.norm", net.value_size),
            decoder.matrix("delta_out", values, 0.2, (f"{AT}.out_proj", hidden)),
            decoder.post_norm(sizes, at),
            decoder.matrix("gate_up", hidden, 0.2, (f"{at}.mlp.gate_proj", 48), (f"{at}.mlp.up_proj", 48)),
            decoder.matrix("down", 48, 0.2, (f"{at}.mlp.down_proj", hidden)),
        ),
    )
    names = {"a_log": "A_log", "dt_bias": "dt_bias"}
    decay = Unit(
        "layers.0.decay",
        tuple(
            Param(name, (net.value_heads,), (CheckpointPart(f"{AT}.{key}", net.value_heads),), dtype=torch.float32)
            for name, key in names.items()
        ),
    )
    block = decoder.block(sizes, 0, net, mlp)
    return decoder.model("Hybrid", {}, sizes, [unit], [block], extra={0: decay})


def random_model(spec):
    model = Native(spec, torch.float64)
    generator = torch.Generator().manual_seed(3)
    for unit in model.params:
        for tensor in unit.values():
            tensor.normal_(0, 0.3, generator=generator)
    return model


def batch(spec):
    torch.manual_seed(5)
    ids, labels = torch.randint(61, (2, TOKENS))
    return ids, replace(make_micro_batch(spec, DOCUMENTS, labels, torch.float64), sample=torch.tensor([7, 3, 0]))


@pytest.mark.parametrize(
    "transform",
    [
        lambda spec: spec,
        lambda spec: with_lora(spec, LoRA(r=3, lora_dropout=0.3, modules_to_save=("embed_tokens",))),
        lambda spec: with_lora(spec, LoRA(r=3, target_modules=("in_proj_a", "in_proj_z"))),
    ],
    ids=["full", "lora", "some_modules"],
)
def test_gradients_against_autograd_in_float64(transform) -> None:
    spec = transform(spec_with())
    model = random_model(spec)
    ids, mb = batch(spec)
    model.backward(ids, mb)
    trained = [params for unit, params in zip(spec.units, model.params, strict=True) if unit.trainable]
    leaves = [tensor.requires_grad_() for params in trained for tensor in params.values()]
    loss = torch.nn.functional.cross_entropy(model.logits(ids, mb, keep=True), mb.labels, reduction="sum")
    found = [tensor for unit in model.grads for tensor in unit.values()]
    for gradient, expected in zip(found, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_adapters_of_all_projections_are_merged_as_they_compute(use_dora) -> None:
    base = spec_with()
    spec = with_lora(base, LoRA(r=3, use_dora=use_dora))
    assert [name for name in adapted(spec) if name.startswith(AT)] == MODULES
    model, plain = random_model(spec), Native(base, torch.float64)
    view = merged(spec, model.view)
    for index, unit in enumerate(plain.params):
        for name, tensor in unit.items():
            tensor.copy_(view(index, name))
    ids, mb = batch(spec)
    torch.testing.assert_close(model.logits(ids, mb), plain.logits(ids, mb), rtol=1e-10, atol=1e-10)


def test_projections_of_a_frozen_base_are_quantized() -> None:
    net = DeltaNet.of(64, key_heads=4, value_heads=8, key_size=8, value_size=8, width=4, eps=1e-6)
    spec = with_base(with_lora(spec_with(net, 64), LoRA(r=3)), "nf4")
    quantized = [param.name for unit in spec.units for param in unit.quantized]
    assert quantized == ["delta_qkvz", "delta_ba", "delta_out", "gate_up", "down"]


TRANSFORMS = {
    "none": lambda spec: spec,
    "lora": lambda spec: with_lora(spec, LoRA(r=3)),
    "half sums": with_half_sums,
    "fp8": with_fp8,
    "fp8, lora": lambda spec: with_fp8(with_lora(spec, LoRA(r=3))),
    "fp8, lora of one": lambda spec: with_fp8(with_lora(spec, LoRA(r=3, target_modules=("in_proj_b",)))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("repeats", [2, 3], ids=["gates_in_fp8", "gates_not_in_fp8"])
def test_kept_bytes_and_gradients_of_narrow_types(transform, repeats) -> None:
    """Against float64, from the same weights; with 12 value heads the product of gates has 24 rows."""
    net = DeltaNet.of(32, key_heads=4, value_heads=4 * repeats, key_size=8, value_size=8, width=4, eps=1e-6)
    spec, dtype = TRANSFORMS[transform](spec_with(net)), torch.bfloat16
    layer, generator = spec.layers[0], torch.Generator().manual_seed(1)
    p = parameters(spec, layer, dtype, generator)
    p |= {name: p[name].float() for name in ("a_log", "dt_bias")}
    x, dy = (torch.randn(TOKENS, 32, generator=generator).to(dtype) for _ in range(2))
    mb = make_micro_batch(spec, DOCUMENTS, dtype=dtype)
    planned = layer.kept_bytes(TOKENS, 2) - layer.mixer.rule_kept_bytes(TOKENS, 2)
    for tensors in (layer.forward_saved(p, x, mb)[1], layer.recompute(p, x, mb)):
        assert storage_bytes((tensors, x)) == planned
    assert (layer.mixer.qkvz.in_fp8, layer.mixer.ba.in_fp8) == ("fp8" in transform, "fp8" in transform and repeats == 2)

    exact = {
        name: weight.rows.dequantize(torch.float64) if isinstance(weight, FP8Weight) else weight.double()
        for name, weight in p.items()
    }
    plain = layer.with_products(lambda product: replace(product, in_fp8=False))
    found, expected = results(layer, p, x, dy, mb), results(plain, exact, x.double(), dy.double(), mb)
    tolerance = 0.2 if "fp8" in transform else 0.1
    for name, tensor in expected.items():
        assert (found[name].double() - tensor).norm() <= tolerance * tensor.norm(), name


def results(layer, p, x, dy, mb):
    """The gradients of the input and of all parameters."""
    shapes = {name: w.rows.codes.shape if isinstance(w, FP8Weight) else w.shape for name, w in p.items()}
    g = {name: torch.zeros(shape, dtype=wide(x.dtype)) for name, shape in shapes.items()}
    return {"x": layer.backward(p, g, layer.forward_saved(p, x, mb)[1], dy, mb), **g}
