"""The routers' auxiliary loss: with one layer that of transformers; where its weight comes from; what is padding."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.transforms.balance import balance_of, balanced, note
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError
from tests.families import VARIANTS
from tests.models.conftest import COMMON, Native
from tests.models.test_against_transformers import by_stored_name

ONE = torch.ones(())


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "minimax-m2"])
def test_every_gradient_is_that_of_transformers(name, micro_batch, tmp_path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    settings = {**COMMON, **VARIANTS[name], "num_hidden_layers": 1}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    theirs.set_experts_implementation("eager")
    for buffer_name, buffer in theirs.named_buffers():
        if buffer_name.endswith("correction_bias"):
            buffer.uniform_(-0.3, 0.3)
    theirs.save_pretrained(tmp_path)
    spec = balanced(registry.build(read_config(tmp_path)), 30.0)
    ours = Native(spec, torch.float32)
    pretrained.load(pretrained.check(tmp_path, spec), spec, ours.view)
    ids, labels = torch.randint(61, (2, 12)), torch.randint(61, (2, 12))
    labels[0, :3] = -100
    labels[1, 7:] = -100
    mb = micro_batch(spec, [[12], [7, 5]], labels.flatten())

    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 7:] = 0
    out = theirs(ids, attention_mask=mask, output_router_logits=True)
    (F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum") + 30 * out.aux_loss).backward()
    ours.backward(ids.flatten(), replace(mb, balance=balance_of(mb.labels, mb.cu_seqlens, ONE)))
    gradients = ours.gradients()
    for key, gradient in by_stored_name(theirs).items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-5, atol=1e-5 * size, msg=key)
    alone = Native(spec, torch.float32)
    pretrained.load(pretrained.check(tmp_path, spec), spec, alone.view)
    alone.backward(ids.flatten(), mb)
    key = next(key for key in gradients if key.endswith((".router.weight", ".gate.weight")))
    assert (alone.gradients()[key] - gradients[key]).norm() > 0.1 * gradients[key].norm(), "it must have a part"


def test_padding_is_what_lies_in_documents_without_a_label() -> None:
    labels = torch.tensor([-100, 5, -100, -100, 3, -100, -100])
    cu_seqlens = torch.tensor([0, 3, 4, 6, 7, 7, 7], dtype=torch.int32)  # that are fewer than there are places for
    found = balance_of(labels, cu_seqlens, ONE)
    assert found.counted.tolist() == [True, True, True, False, True, True, False] and found.tokens == 5
    assert balance_of(torch.full((7,), -100), cu_seqlens, ONE).tokens == 1  # no division by zero


def test_where_its_weight_comes_from() -> None:
    config = {**COMMON, **VARIANTS["qwen3-moe-some-dense"], "head_dim": 6, "architectures": ["Qwen3MoeForCausalLM"]}
    for changes, given, expected in (
        ({}, None, 0.0),
        ({"router_aux_loss_coef": 0.2}, None, 0.0),
        ({"router_aux_loss_coef": 0.2, "output_router_logits": True}, None, 0.2),
        ({"output_router_logits": True}, None, 0.001),
        ({"router_aux_loss_coef": 0.2, "output_router_logits": True}, 0.0, 0.0),
        ({}, 0.5, 0.5),
    ):
        spec = balanced(registry.build(config | changes), given)
        assert spec.router_aux_loss_coef == expected
        assert [router and router.balance for router in routers(spec)] == [None, expected, None, None]
    glm = {**COMMON, **VARIANTS["glm4-moe"], "architectures": ["Glm4MoeForCausalLM"], "output_router_logits": True}
    assert [balanced(registry.build(glm), given).router_aux_loss_coef for given in (None, 0.5)] == [0.0, 0.5]
    with pytest.raises(UserError, match="router_aux_loss_coef must be a positive number, not 'much'"):
        asked = {"output_router_logits": True, "router_aux_loss_coef": "much"}
        balanced(registry.build(config | asked), None)
    with pytest.raises(UserError, match="this model has none"):
        balanced(registry.build({**COMMON, "head_dim": 6, "architectures": ["LlamaForCausalLM"]}), 0.1)


def routers(spec):
    return [layer.feed_forward.router for layer in spec.layers]


def test_a_note_says_where_it_differs_from_transformers() -> None:
    """With one layer of experts it is the same, and for GLM transformers has none."""
    config = {**COMMON, **VARIANTS["qwen3-moe"], "head_dim": 6, "architectures": ["Qwen3MoeForCausalLM"]}
    asked = config | {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    assert "router_aux_loss_coef 0.02)" in note(balanced(registry.build(asked), None))
    some = {**COMMON, **VARIANTS["qwen3-moe-some-dense"], "head_dim": 6, "architectures": ["Qwen3MoeForCausalLM"]}
    glm = {**COMMON, **VARIANTS["glm4-moe"], "architectures": ["Glm4MoeForCausalLM"]}
    for quiet, given in ((config, None), (asked, 0.0), (some, 0.5), (glm, 0.5)):
        assert not note(balanced(registry.build(quiet), given))
