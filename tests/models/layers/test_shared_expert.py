"""The MLP beside experts whose output is multiplied by a gate, against transformers and autograd."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.kernels import fp8
from rptrain.kernels.fp8 import Form
from rptrain.models.decode.generate import generate
from rptrain.models.families import decoder, registry
from rptrain.models.families.config import read_shape
from rptrain.models.layers.block import blocks
from rptrain.models.layers.mlp import SharedMLP
from rptrain.models.layers.moe import MoE
from rptrain.models.params import Unit
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.half_sums import with_half_sums
from rptrain.models.transforms.lora import LoRA, adapted, with_lora
from rptrain.models.transforms.names import adaptable_parameters
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights import pretrained
from tests.models.conftest import COMMON, Native
from tests.models.layers.test_kept_bytes import parameters, storage_bytes
from tests.models.layers.test_layers import assert_memory_bounds, to_cuda

SHARED, TOKENS, DOCUMENTS = 10, 22, [[5, 6], [11]]
CONFIG = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "head_dim": 6,
    "norm_topk_prob": True,
}
KEPT = {
    "plain": lambda spec: spec,
    "fp8": with_fp8,
    "dropout": lambda spec: with_lora(spec, LoRA(r=3, lora_dropout=0.3)),
    "dora": lambda spec: with_lora(spec, LoRA(r=3, use_dora=True)),
}
IDS = torch.arange(TOKENS) * 7 % 61


def gated_spec(shared: int = SHARED, **settings) -> ModelSpec:
    """Qwen3-MoE with gated MLPs beside its experts."""
    config = CONFIG | settings
    spec = registry.build(config)
    shape = read_shape(config, unsupported=[])
    mlp = SharedMLP.of(spec.hidden_size, shared, gated=True)
    units, layers = list(spec.units), []
    for block in blocks(spec):
        own = block.units[0]
        params = decoder.shared_expert_params(shape, mlp, f"model.{block.name}.mlp.shared_expert")
        units[own] = Unit(units[own].name, (*units[own].params, *params))
        assert isinstance(block.feed_forward, MoE)
        layers.append(replace(block, feed_forward=replace(block.feed_forward, shared=mlp)))
    return replace(spec, units=tuple(units), layers=tuple(layers), mlp_modules=True)


def native(dtype: torch.dtype, change=lambda spec: spec, **settings) -> Native:
    model = Native(change(gated_spec(**settings)), dtype)
    pretrained.initialize(model.spec, model.view, seed=1)
    return model


AT = "model.layers.0.mlp."
LORA = LoRA(r=3, lora_alpha=5, target_modules=r"model\.layers\.0\.mlp\.shared_expert.*")


def hugging_face(kind: str, over_chosen: bool):
    """A random block of experts of transformers."""
    from transformers import AutoConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    block_class = Qwen3NextSparseMoeBlock if kind == "qwen3_next" else Qwen3_5MoeSparseMoeBlock
    names = ("hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    settings = {name: CONFIG[name] for name in names} | {"norm_topk_prob": over_chosen}
    config = AutoConfig.for_model(kind, shared_expert_intermediate_size=SHARED, **settings)
    config._experts_implementation = "eager"
    return block_class(config)


def by_stored_name(parameters) -> dict[str, torch.Tensor]:
    """Tensors of transformers' parameters by the names of a checkpoint that has a tensor for each expert."""
    found = {}
    for name, tensor in parameters.items():
        name = AT + name.replace(".base_layer", "").replace(".default", "")
        if not name.startswith(f"{AT}experts."):
            found[name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert, whole in enumerate(tensor):
            pieces = zip(kinds, whole.chunk(len(kinds)), strict=True)
            found |= {f"{AT}experts.{expert}.{kind}.weight": piece for kind, piece in pieces}
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
@pytest.mark.parametrize(
    ("kind", "over_chosen"), [("qwen3_5_moe_text", False), ("qwen3_next", False), ("qwen3_next", True)]
)
def test_output_and_every_gradient_are_those_of_transformers(kind, over_chosen, lora, micro_batch) -> None:
    """Qwen3.5 always divides the weights of a token's experts by their sum, and Qwen3-Next by its config."""
    theirs = hugging_face(kind, over_chosen)
    if lora:
        from peft import LoraConfig, inject_adapter_in_model

        targets = ["shared_expert_gate", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
        theirs = inject_adapter_in_model(LoraConfig(r=3, lora_alpha=5, target_modules=targets), theirs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3, generator=generator)

    settings = {"norm_topk_prob": over_chosen or kind != "qwen3_next"}
    model = native(torch.float32, (lambda spec: with_lora(spec, LORA)) if lora else (lambda spec: spec), **settings)
    stored = by_stored_name({name: parameter.detach() for name, parameter in theirs.named_parameters()})
    for name, tensor in model.tensors(model.params).items():
        if name.startswith(AT):
            tensor.copy_(stored[name])

    layer = blocks(model.spec)[0]
    part, p, g = layer.feed_forward, model.of(layer, model.params), model.of(layer, model.grads)
    x = torch.randn(TOKENS, model.spec.hidden_size, generator=generator).requires_grad_()
    dy = torch.randn(x.shape, generator=generator)
    expected = theirs(x[None])[0]
    expected.backward(dy)
    mb = micro_batch(model.spec, DOCUMENTS)
    saved = part.inner(p, fp8.operand(x.detach(), Form.PLAIN), mb)
    close(part.output(p, saved, mb), expected)
    residual = x.detach().clone()
    close(part.add(p, saved, residual, mb, 1.0, overwrite=False), x + expected)
    close(part.backward(p, g, saved, dy, mb), x.grad)
    gradients = by_stored_name({name: each.grad for name, each in theirs.named_parameters() if each.grad is not None})
    ours = {name: gradient for name, gradient in model.gradients().items() if name.startswith(AT)}
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(ours[name], gradient)


def close(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_gradients_against_autograd_in_float64(micro_batch) -> None:
    model = native(torch.float64)
    mb = micro_batch(model.spec, DOCUMENTS, IDS, torch.float64)
    loss = model.backward(IDS, mb, scale=0.7)
    leaves = [tensor.requires_grad_() for params in model.params for tensor in params.values()]
    expected = torch.nn.functional.cross_entropy(model.logits(IDS, mb, keep=True), IDS, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    ours = [tensor for unit in model.grads for tensor in unit.values()]
    for gradient, theirs in zip(ours, torch.autograd.grad(0.7 * expected, leaves), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [16, 640])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_of_memory_hold(dtype, shared, micro_batch) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 64}
    model, tokens = native(dtype, shared=shared, **sizes), 512
    layer = model.spec.layers[0]
    mb = micro_batch(model.spec, [[2]] * 256, torch.arange(tokens) % 61, dtype)
    x, dy = (torch.randn(tokens, 64).to(dtype) for _ in range(2))
    assert_memory_bounds(layer, model.params[1], model.grads[1], x, dy, mb)


@pytest.mark.parametrize("transform", KEPT.values(), ids=KEPT)
def test_kept_bytes_are_those_of_the_kept_tensors(transform, micro_batch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "moe_intermediate_size": 16, "shared": 16}
    spec, dtype = transform(gated_spec(**sizes)), torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    mb = replace(micro_batch(spec, DOCUMENTS, IDS, dtype), sample=torch.tensor([7, 3, 0]))
    layer, x = spec.layers[0], torch.randn(TOKENS, spec.hidden_size, generator=generator).to(dtype)
    p = parameters(spec, layer, dtype, generator)
    for saved in (layer.forward_saved(p, x, mb)[1], layer.recompute(p, x, mb)):
        assert storage_bytes((saved, x)) == layer.kept_bytes(TOKENS, dtype.itemsize)


def test_fp8_leaves_the_gate_in_the_models_type() -> None:
    spec = with_fp8(gated_spec(hidden_size=32, head_dim=16, moe_intermediate_size=16, shared=16))
    assert {param.name for param in spec.units[1].params if len(param.shape) == 2 and not param.in_fp8} == {
        "router",
        "shared_gate",
    }
    products = {product.name: product.in_fp8 for product in blocks(spec)[0].products}
    assert products == {"qkv": True, "o": True, "shared_gate_up": True, "shared_down": True, "shared_gate": False}


@pytest.mark.parametrize("base", ["nf4", "mxfp4", "int8", "fp8"])
def test_a_base_in_4_or_8_bits_leaves_the_gate_as_it_is(base) -> None:
    sizes = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128, "shared": 128}
    spec = with_base(with_lora(gated_spec(**sizes), LoRA(target_modules=("q_proj",))), base)
    assert {param.name for unit in spec.units for param in unit.quantized} == {
        "qkv",
        "o",
        "experts_gate_up",
        "experts_down",
        "shared_gate_up",
        "shared_down",
    }


def test_experts_are_read_singly_and_stacked(tmp_path) -> None:
    """Qwen3.5 is published with a tensor for all experts of a layer; transformers saves one for each and reads both."""
    model = native(torch.float32)
    pretrained.save(tmp_path / "single", model.spec, model.view, torch.float32)
    stored = load_file(tmp_path / "single" / "model.safetensors")
    stacked = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([stored[f"{at}.{expert}.{kind}_proj.weight"] for expert in range(CONFIG["num_experts"])])
            for kind in ("gate", "up", "down")
        )
        stacked |= {f"{at}.gate_up_proj": torch.cat([gates, ups], 1), f"{at}.down_proj": downs}
    (tmp_path / "stacked").mkdir()
    save_file(stacked, tmp_path / "stacked" / "model.safetensors")
    for kind in ("single", "stacked"):
        again = Native(model.spec, torch.float32)
        pretrained.load(pretrained.check(tmp_path / kind, model.spec), model.spec, again.view)
        for ours, theirs in zip(again.params, model.params, strict=True):
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [lambda spec: spec, with_half_sums], ids=["plain", "half_sums"])
def test_cuda_follows_float64(change, dtype, micro_batch) -> None:
    sizes = {"num_experts_per_tok": 5, "head_dim": 16}
    model, exact = native(dtype, change, **sizes), native(torch.float64, **sizes)
    for unit, source in zip(exact.params, model.params, strict=True):
        for name, tensor in unit.items():
            tensor.copy_(source[name])
    exact.backward(IDS, micro_batch(exact.spec, DOCUMENTS, IDS, torch.float64))
    mb = to_cuda(model, micro_batch(model.spec, DOCUMENTS, IDS, dtype))
    model.backward(IDS.cuda(), mb)
    for name, gradient in model.gradients().items():
        theirs = exact.gradients()[name]
        assert (gradient.double().cpu() - theirs).norm() <= 0.1 * theirs.norm(), name


def test_gates_have_adapters_in_every_class_and_shared_mlps_where_peft_finds_their_modules() -> None:
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    shared = [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for mlp_modules, modules, weights in (
        (True, [*attention, *shared, "mlp.shared_expert_gate"], experts),
        (False, [*attention, "mlp.shared_expert_gate"], [*experts, *(f"{name}.weight" for name in shared)]),
    ):
        spec = replace(gated_spec(), mlp_modules=mlp_modules)
        assert adapted(with_lora(spec, LoRA())) == [f"model.layers.{n}.{name}" for n in range(2) for name in modules]
        found = dict.fromkeys(adaptable_parameters(spec).values())
        assert {*found} == {f"model.layers.{n}.{name}" for n in range(2) for name in weights}
    named = with_lora(replace(gated_spec(), mlp_modules=True), LoRA(target_modules=("down_proj",)))
    assert adapted(named) == [f"model.layers.{n}.mlp.shared_expert.down_proj" for n in range(2)]


def test_greedy_generation_follows_the_logits(micro_batch) -> None:
    model = native(torch.float32)
    prompt = IDS[:7].tolist()
    made = generate(model.spec, model.params.__getitem__, [prompt], 5)[0]
    ids = torch.tensor([*prompt, *made])
    expected = model.logits(ids, micro_batch(model.spec, [[len(ids)]])).argmax(1)
    assert made == expected[len(prompt) - 1 : -1].tolist()
