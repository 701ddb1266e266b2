"""Nulls in a config.json, and settings that are ignored."""

import pytest

from rptrain.models import registry
from rptrain.utils.errors import UserError

from .test_configs import GRANITE, MINISTRAL3, OLMO3, SEED_OSS, SMOLLM3


@pytest.mark.parametrize(
    ("config", "key", "attribute", "expected"),
    [
        (OLMO3, "rms_norm_eps", "eps", 1e-5),
        (MINISTRAL3, "rms_norm_eps", "eps", 1e-5),
        (SMOLLM3, "tie_word_embeddings", "tied", True),
        (OLMO3, "rope_theta", "inv_freq", 500_000**-0.5),
        (SMOLLM3, "rope_theta", "inv_freq", 2_000_000**-0.5),
    ],
)
def test_null_is_the_default(config, key, attribute, expected) -> None:
    spec = registry.build({**config, key: None})
    found = {"eps": spec.layers[0].eps, "tied": spec.tied, "inv_freq": spec.rotaries[0].inv_freq[-1]}
    assert found[attribute] == pytest.approx(expected)


def test_null_as_a_value() -> None:
    """As transformers reads the same config.json."""
    from transformers import SeedOssConfig, SmolLM3Config

    for ours, theirs in ((SEED_OSS, SeedOssConfig), (SMOLLM3, SmolLM3Config)):
        null = {**ours, "num_key_value_heads": None}
        assert registry.build(null).layers[0].kv_heads == theirs(**null).num_key_value_heads == 4
    for head_dim in ({}, {"head_dim": None}):
        described = {**SEED_OSS, "num_attention_heads": 8, **head_dim}
        block, theirs = registry.build(described).layers[0], SeedOssConfig(**described)
        assert (block.head_size, block.kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    with pytest.raises(UserError, match="sliding_window is missing"):
        registry.build({**OLMO3, "sliding_window": None})


@pytest.mark.parametrize("config", [GRANITE, {**SEED_OSS, "num_key_value_heads": 2}], ids=["granite", "seed_oss"])
def test_dropout_is_ignored_where_published_files_name_it(config) -> None:
    assert registry.build({**config, "attention_dropout": 0.1}).layers == registry.build(config).layers
