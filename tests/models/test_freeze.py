"""Patterns over the names of a checkpoint's tensors split a model's units into what is frozen and what is trained."""

import pytest
import torch

from rptrain.errors import UserError
from rptrain.models import registry, weights
from rptrain.models.freeze import freeze

from .test_shapes import GPT_OSS, QWEN3_MOE, TINY

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
        (["*.q_proj.weight"], "without model.layers.0.self_attn.k_proj.weight, .*v_proj.weight, as they are one matrix"),
        (["*"], "leaves nothing to train"),
    ],
)  # fmt: skip
def test_patterns_that_cannot_be(patterns, message):
    with pytest.raises(UserError, match=f"(?s)train.freeze.*{message}"):
        freeze(registry.build(LLAMA), patterns)


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE, GPT_OSS], ids=["llama", "qwen3-moe", "gpt-oss"])
def test_a_gradient_is_half_of_backwards_products(config):
    """The other half is the input's; with biases the weights of a token's experts have a product beside."""
    spec = registry.build(config)
    for layer in spec.stack:
        forward, backward = layer.work(8, 4, 4)
        work = [layer.gradient_work(param, 8) for unit in layer.units for param in spec.units[unit].params]
        assert sum(part.matmul for part in work) == forward.matmul
        assert sum(part.grouped for part in work) == forward.grouped == backward.grouped / 2
        assert sum(part.attention for part in work) == sum(part.traffic for part in work) == 0
        for part in work:
            backward = backward.without(part)
        biased = any(param.name == "router_bias" for unit in layer.units for param in spec.units[unit].params)
        assert backward.matmul == forward.matmul + biased * 2 * 8 * 24 * 5


def test_weights_of_some_units_alone():
    """As a run that is resumed reads or draws those that its checkpoint leaves out."""
    spec = freeze(registry.build(LLAMA), ["model.layers.1.*", "model.embed_tokens.weight"])
    whole, some = ([unit.views(torch.zeros(unit.numel)) for unit in spec.units] for _ in range(2))
    weights.initialise(spec, lambda unit, name: whole[unit][name], 3)
    weights.initialise(spec, lambda unit, name: some[unit][name], 3, spec.frozen)
    for index, unit in enumerate(spec.units):
        for param in unit.params:
            filled = index in spec.frozen
            expected = whole[index][param.name] if filled else torch.zeros(param.shape)
            assert torch.equal(some[index][param.name], expected)
