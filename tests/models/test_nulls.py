"""Nulls in a config.json, and settings that are ignored."""

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError

from rptrain.models.families import registry
from rptrain.utils.errors import UserError
from tests.families import FAMILIES

from .test_configs import GRANITE, SEED_OSS, SMOLLM3
from .test_published_configs import of_kind
from .test_shapes import theirs

EVERYWHERE = ("rms_norm_eps", "initializer_range", "tie_word_embeddings")


@pytest.mark.parametrize("kind", FAMILIES)
def test_null_is_refused_as_in_transformers(kind) -> None:
    for key in (*EVERYWHERE, *FAMILIES[kind].not_null):
        config = of_kind(kind, **{key: None})
        with pytest.raises((TypeError, StrictDataclassFieldValidationError)):
            theirs(config, "meta")
        with pytest.raises(UserError) as caught:
            registry.build(config)
        assert str(caught.value).splitlines()[1:] == [f"- {key} is null: remove it"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "glm4_moe", "phi3"])
def test_null_is_not_the_base_of_rotary_positions(kind) -> None:
    for config in (of_kind(kind, rope_theta=None), of_kind(kind, rope_scaling={"rope_theta": None})):
        with pytest.raises(UserError, match="rope_theta of the rotary embedding must be a positive number, not None"):
            registry.build(config)


def test_null_rope_parameters_are_the_default() -> None:
    for kind in ("gpt_oss", "ministral3"):
        config = of_kind(kind)
        assert registry.build({**config, "rope_parameters": None}).rotaries == registry.build(config).rotaries


def test_null_as_a_value() -> None:
    """As transformers reads the same config.json."""
    from transformers import SeedOssConfig, SmolLM3Config

    for ours, config_class in ((SEED_OSS, SeedOssConfig), (SMOLLM3, SmolLM3Config)):
        null = {**ours, "num_key_value_heads": None}
        assert registry.build(null).layers[0].mixer.kv_heads == config_class(**null).num_key_value_heads == 4
    for head_dim in ({}, {"head_dim": None}):
        described = {**SEED_OSS, "num_attention_heads": 8, **head_dim}
        mixer, expected = registry.build(described).layers[0].mixer, SeedOssConfig(**described)
        assert (mixer.head_size, mixer.kv_heads) == (expected.head_dim, expected.num_key_value_heads)


@pytest.mark.parametrize("config", [GRANITE, {**SEED_OSS, "num_key_value_heads": 2}], ids=["granite", "seed_oss"])
def test_dropout_is_ignored_where_published_files_name_it(config) -> None:
    assert registry.build({**config, "attention_dropout": 0.1}).layers == registry.build(config).layers
