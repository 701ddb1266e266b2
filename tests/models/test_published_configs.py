"""Published spellings of config.json, with older keys and without keys that have defaults, against transformers."""

from copy import deepcopy
from typing import Any

import pytest

from rptrain.models.families import registry
from rptrain.models.layers.attention import Attention
from rptrain.models.layers.block import blocks
from rptrain.models.layers.delta_net import DeltaNet
from rptrain.models.locate import locate, presets, read_config
from rptrain.models.spec import ModelSpec
from tests.families import FAMILIES

from .test_shapes import parameters_by_unit, sizes_of, theirs

COMMON = {
    "vocab_size": 32,
    "hidden_size": 512,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "pad_token_id": None,
}


def of_kind(kind: str, **keys: Any) -> dict[str, Any]:
    """A small config.json of a model type, which has the keys that it must have and these."""
    return {**COMMON, **FAMILIES[kind].required, "model_type": kind, **keys}


def settings(spec: ModelSpec) -> list[dict[str, Any]]:
    """The settings of each layer."""

    def of_mixer(mixer: Any, eps: float) -> dict[str, Any]:
        if isinstance(mixer, DeltaNet):
            heads = (mixer.key_heads, mixer.value_heads, mixer.key_size, mixer.value_size)
            return {"eps": {mixer.eps, eps, spec.head.eps}, "heads": heads, "width": mixer.width}
        assert isinstance(mixer, Attention)
        rotary = None if mixer.rotary is None else spec.rotaries[mixer.rotary]
        queries = rotary and rotary.query_scaling
        return {
            "eps": {mixer.eps, eps, spec.head.eps},
            "window": mixer.window,
            "heads": (mixer.heads, mixer.kv_heads, mixer.head_size),
            "scale": mixer.head_size**-0.5 if mixer.scale is None else mixer.scale,
            "frequencies": rotary and list(rotary.inv_freq),
            "factor": rotary and rotary.factor,
            "queries": queries and (queries.beta, queries.original_max_position_embeddings),
        }

    return [of_mixer(block.mixer, block.norms.eps) for block in blocks(spec)]


def settings_of(model) -> list[dict[str, Any]]:
    """The settings of each layer of transformers' model."""
    config = model.config
    rotary = type(model.model.rotary_emb)(config)  # the model is on the meta device
    names = ("variance_epsilon", "eps")
    eps = {getattr(norm, name) for norm in model.modules() for name in names if hasattr(norm, name)}

    def of_layer(layer) -> dict[str, Any]:
        if hasattr(layer, "linear_attn"):
            delta = layer.linear_attn
            heads = (delta.num_k_heads, delta.num_v_heads, delta.head_k_dim, delta.head_v_dim)
            return {"eps": eps, "heads": heads, "width": delta.conv_kernel_size}
        attention = layer.self_attn
        kind = f"{attention.attention_type}_" if hasattr(attention, "attention_type") else ""  # of the layer
        rotates = getattr(attention, "use_rope", True)  # SmolLM3
        beta = config.rope_parameters.get("llama_4_scaling_beta")
        return {
            "eps": eps,
            "window": getattr(attention, "sliding_window", getattr(config, "sliding_window", None)),
            "heads": (config.num_attention_heads, config.num_key_value_heads, attention.head_dim),
            "scale": attention.scaling,
            "frequencies": getattr(rotary, f"{kind}inv_freq").tolist() if rotates else None,
            "factor": getattr(rotary, f"{kind}attention_scaling") if rotates else None,
            "queries": beta and (beta, config.rope_parameters["original_max_position_embeddings"]),
        }

    return [of_layer(layer) for layer in model.model.layers]


def preset(name: str) -> dict[str, Any]:
    """A preset with its first four layers."""
    config = read_config(locate(name))
    lists = {key: config[key][:4] for key in ("layer_types", "no_rope_layers") if key in config}
    return {**config, **lists, "num_hidden_layers": 4}


def aliased() -> dict[str, dict[str, Any]]:
    """Configs with the other name of the number of experts, alone and beside the usual one with another number."""
    cases = {}
    for kind, (key, alias) in ((kind, family.experts) for kind, family in FAMILIES.items() if family.experts[1:]):
        config = of_kind(kind)
        cases[f"{kind}-both"] = {**config, alias: 4}
        cases[f"{kind}-both-reversed"] = {alias: 4, **config}
        del config[key]
        cases[f"{kind}-alias"] = {**config, alias: 5}
    return cases


CASES = {
    **aliased(),
    **{kind: of_kind(kind) for kind in FAMILIES},
    **{name: of_kind(kind, **keys) for kind in FAMILIES for name, keys in FAMILIES[kind].spellings.items()},
    **{f"preset-{name}": preset(name) for name in presets()},
}


@pytest.mark.parametrize("case", CASES)
def test_configs_are_read_as_transformers_reads_them(case) -> None:
    spec = registry.build(CASES[case])
    model = theirs(deepcopy(CASES[case]), "meta")
    assert settings(spec) == settings_of(model)
    assert sizes_of(spec) == parameters_by_unit(model)
    extra = [getattr(model.config, key, 0) for key in ("num_nextn_predict_layers", "num_mtp_modules")]
    assert sum(name.startswith("model.layers.") for name in spec.carried) == sum(extra)
