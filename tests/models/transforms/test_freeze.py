"""Patterns over the names of a checkpoint's tensors split a model's units into what is frozen and what is trained."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rptrain.models.families import registry
from rptrain.models.transforms import freeze as module
from rptrain.models.transforms.freeze import freeze
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError

from ..test_shapes import GPT_OSS, QWEN3_MOE, TINY

LLAMA = {**TINY, "architectures": ["LlamaForCausalLM"]}


def names(spec, *, trainable):
    units = [unit for unit in spec.units if unit.trainable == trainable]
    return {part.key for unit in units for param in unit.params for part in param.parts}


def test_nothing_is_changed_without_patterns():
    spec = registry.build(LLAMA)
    assert freeze(spec, ()) == spec
    assert spec.frozen == ()


@pytest.mark.parametrize(
    ("patterns", "frozen", "trained"),
    [
        (["model.embed_tokens.weight"], ["embed"], []),
        (["model.layers.1.*"], ["layers.1"], []),
        (["model.layers.0.mlp.*"], ["layers.0"], ["layers.0.trained"]),
        (["model.norm.weight", "*.layers.1.input_layernorm.*"], ["layers.1", "norm"], ["layers.1.trained"]),
    ],
)
def test_units_keep_their_places_and_what_is_trained_of_a_part_comes_last(patterns, frozen, trained):
    before = registry.build(LLAMA)
    spec = freeze(before, patterns)
    assert [unit.name for unit in spec.units] == [unit.name for unit in before.units] + trained
    assert [spec.units[index].name for index in spec.frozen] == frozen
    assert names(spec, trainable=True) | names(spec, trainable=False) == names(before, trainable=True)
    assert not names(spec, trainable=True) & names(spec, trainable=False)
    assert spec.num_parameters == before.num_parameters
    for layer, old in zip(spec.stack, before.stack, strict=True):
        split = [index for index, unit in enumerate(spec.units) if unit.name == f"{layer.name}.trained"]
        assert layer.units == (*old.units, *split)


def test_every_tensor_that_matches_one_of_the_patterns_is_frozen():
    spec = freeze(registry.build(QWEN3_MOE), ["*.experts.*", "model.layers.0.self_attn.?_norm.weight"])
    frozen = names(spec, trainable=False)
    assert {name for name in frozen if ".experts." not in name} == {
        f"model.layers.0.self_attn.{which}_norm.weight" for which in "qk"
    }
    assert not [name for name in names(spec, trainable=True) if ".experts." in name]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["model.layer.0.mlp.down_proj.weight"], "closest names are model.layers.0.mlp.down_proj.weight, "),
        (["*.mlp.*", "lm_heads.*", "x"], r"'lm_heads.\*' matches no .* lm_head.weight.*\n.*'x' matches no"),
        (["*.q_proj.weight"], "without model.layers.0.self_attn.k_proj.weight, .*v_proj.weight: they are stored"),
        (["*"], "leaves nothing to train"),
    ],
)  # fmt: skip
def test_patterns_that_cannot_be(patterns, message):
    with pytest.raises(UserError, match=f"(?s)train.freeze.*{message}"):
        freeze(registry.build(LLAMA), patterns)


def test_experts_that_cannot_be_frozen_alone_are_not_all_listed():
    with pytest.raises(UserError) as caught:
        freeze(registry.build({**QWEN3_MOE, "num_experts": 50}), ["*.experts.7.*"])
    assert "experts.0.gate_proj.weight" in str(caught.value) and "and 95 more: they are stored as one" in str(
        caught.value
    )
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE, GPT_OSS], ids=["llama", "qwen3-moe", "gpt-oss"])
def test_a_gradient_is_half_of_backwards_products(config):
    """The other half is the input's; with biases the weights of a token's experts have a product beside."""
    spec = registry.build(config)
    for layer in spec.stack:
        forward, backward = layer.work(8, 4, 4)
        work = [layer.gradient_work(param, 8, 4) for unit in layer.units for param in spec.units[unit].params]
        assert sum(part.matmul for part in work) == forward.matmul
        assert sum(part.grouped for part in work) == forward.grouped == backward.grouped / 2
        assert all(part.attention == part.attention_backward == part.traffic == 0 for part in work)
        for part in work:
            backward = backward.without(part)
        biased = any(param.name == "router_bias" for unit in layer.units for param in spec.units[unit].params)
        assert backward.matmul == forward.matmul + biased * 2 * 8 * 24 * 5


def test_weights_of_some_units_alone():
    """As a run that is resumed reads or draws those that its checkpoint leaves out."""
    spec = freeze(registry.build(LLAMA), ["model.layers.1.*", "model.embed_tokens.weight"])
    whole, some = ([unit.views(torch.zeros(unit.numel)) for unit in spec.units] for _ in range(2))
    pretrained.initialize(spec, lambda unit, name: whole[unit][name], 3)
    pretrained.initialize(spec, lambda unit, name: some[unit][name], 3, spec.frozen)
    for index, unit in enumerate(spec.units):
        for param in unit.params:
            filled = index in spec.frozen
            expected = whole[index][param.name] if filled else torch.zeros(param.shape)
            assert torch.equal(some[index][param.name], expected)


class Products(TorchDispatchMode):
    """Counts the operations of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.count += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"]
)
def test_a_gradient_that_nobody_asks_for_is_not_computed_and_changes_no_other(architecture, fresh, micro_batch):
    model = fresh(architecture)
    torch.manual_seed(3)
    labels, x, dy = torch.randint(61, (22,)), torch.randn(22, 24), torch.randn(22, 24)
    mb = micro_batch(model.spec, [[5, 6], [11]], labels)
    for layer in (model.spec.layers[0], model.spec.head):
        p = model.of(layer, model.params)

        def backward(names, layer=layer, p=p):
            g = {name: torch.zeros_like(p[name]) for name in names}
            with Products() as products:
                if layer is model.spec.head:
                    return layer.loss_backward(p, g, x, mb, 1.0)[1], g, products
                return layer.backward(p, g, layer.recompute(p, x, mb), dy, mb), g, products

        dx, every, all_products = backward(p)
        for left_out in (*({name} for name in p), set(p)):
            got, others, products = backward(p.keys() - left_out)
            assert torch.equal(got, dx), left_out
            assert all(torch.equal(others[name], every[name]) for name in others), left_out
            params = (param for unit in layer.units for param in model.spec.units[unit].params)
            spared = sum(layer.gradient_work(param, 22, 4).flops for param in params if param.name in left_out)
            if "experts_down_bias" in left_out:  # a product of one column, which is not counted
                spared += 2 * 22 * layer.feed_forward.router.active * layer.hidden
            assert all_products.count - products.count == spared, left_out


def test_many_patterns_are_counted(monkeypatch):
    compared = []
    monkeypatch.setattr(module, "nearest", lambda word, *given: compared.append(word) or ["name"])
    with pytest.raises(UserError, match=r"train.freeze: 1,990 more patterns match nothing$"):
        freeze(registry.build(LLAMA), [f"nosuch.{index}" for index in range(2_000)] * 2)
    assert len(compared) == module.LISTED
