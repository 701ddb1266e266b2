"""Configs of models with a text model and other parts."""

import pytest

from rptrain.models.families import registry
from rptrain.utils.errors import UserError

from .test_configs import MISTRAL
from .test_published_configs import of_kind

TOWER = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}


def test_the_text_model_of_a_larger_one() -> None:
    """Settings of the whole model count where text_config leaves them out, and tie_word_embeddings always."""
    text = {key: value for key, value in MISTRAL.items() if key != "architectures"}
    whole = {**TOWER, "dtype": "bfloat16", "tie_word_embeddings": True, "text_config": text}
    spec = registry.build(whole)
    assert (spec.architecture, spec.tied, spec.text_config) == ("Mistral3ForConditionalGeneration", True, text)
    assert registry.text_only(whole) == {
        **text,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "model_type": "mistral",
    }
    assert registry.text_only(text) == text
    assert registry.build({**whole, "text_config": {**text, "tie_word_embeddings": False}}).tied
    text["tie_word_embeddings"] = True
    assert not registry.build({**whole, "tie_word_embeddings": False, "text_config": text}).tied


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_qwen_alone_and_inside_of_a_larger_model(kind) -> None:
    """The files of the whole model are read as those of its text model, too; only its own setting ties the head."""
    text = of_kind(f"{kind}_text")
    alone = registry.build(text)
    whole = {"model_type": kind, "text_config": {**text, "tie_word_embeddings": True}, "vision_config": {}}
    spec = registry.build(whole)
    assert spec.architecture == f"{alone.architecture.removesuffix('CausalLM')}ConditionalGeneration"
    assert (spec.tied, registry.build({**whole, "tie_word_embeddings": True}).tied) == (False, True)
    assert registry.build(registry.text_only(whole)).architecture == alone.architecture
    name = "model.language_model.layers.0.linear_attn.A_log"
    assert (alone.module_name(name), alone.stored_name(alone.module_name(name))) == (
        "model.layers.0.linear_attn.A_log",
        "model.layers.0.linear_attn.A_log",
    )
    assert spec.module_name(name) == spec.stored_name(name) == name
    keys = {part.key for unit in spec.units for param in unit.params for part in param.parts}
    assert name in keys and "lm_head.weight" in keys
    for each in (alone, spec):
        assert all(
            map(each.carries, ("mtp.layers.0.mlp.gate.weight", "mtp.fc.weight", "model.visual.pos_embed.weight"))
        )
        assert not each.carries(name)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TOWER, "text_config must be a JSON object"),
        ({**TOWER, "text_config": {"model_type": "pixtral"}}, "'pixtral' is not supported in Mistral3"),
        ({**TOWER, "text_config": {**MISTRAL, "hidden_act": "gelu"}}, "hidden_act 'gelu' is not supported"),
        ({**TOWER, "text_config": MISTRAL, "tie_word_embeddings": None}, "tie_word_embeddings is null: remove it"),
        ({**TOWER, "text_config": MISTRAL, "quantization_config": {"quant_method": "fp8"}}, "weights are quantized"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "nor is its multi-head latent attention"),
    ],
)
def test_text_models_that_are_refused(config, words) -> None:
    with pytest.raises(UserError, match=words):
        registry.build(config)
