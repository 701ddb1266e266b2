"""Published spellings of config.json, with older keys and without keys that have defaults, against transformers."""

from copy import deepcopy
from typing import Any

import pytest

from rptrain.models.families import registry
from rptrain.models.layers.attention import Attention
from rptrain.models.layers.block import blocks
from rptrain.models.locate import locate, presets, read_config
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError

from .test_shapes import parameters_by_unit, sizes_of, theirs

COMMON = {
    "vocab_size": 32,
    "hidden_size": 512,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "pad_token_id": None,
}
REQUIRED = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-type": ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 4096}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": None}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 3, "num_key_value_heads": None}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": YARN, "rope_theta": 1_000_000, "max_position_embeddings": 131072}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "gpt-oss-theta": ("gpt_oss", {"rope_theta": 10000, "rope_scaling": None}),
    "gpt-oss-no-yarn": ("gpt_oss", {"rope_parameters": {}}),
    "glm-quarter": ("glm4_moe", {"partial_rotary_factor": 0.25, "rope_scaling": LLAMA3, "rope_theta": 500_000.0}),
    "glm-mtp": ("glm4_moe", {"num_mtp_layers": 2}),
    "glm-mtp-both": ("glm4_moe", {"num_mtp_layers": 2, "num_nextn_predict_layers": 3}),
    "glm-null": ("glm4_moe", {"partial_rotary_factor": None}),
    "glm-parameters": ("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}}),
    "minimax-rotary-dim": ("minimax_m2", {"rotary_dim": 32, "rope_theta": 10_000_000}),
    "minimax-both": ("minimax_m2", {"rotary_dim": 32, "partial_rotary_factor": 0.75}),
    "minimax-null": ("minimax_m2", {"rotary_dim": 32, "partial_rotary_factor": None}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75, "rope_theta": 250_000}),
    "olmo3-yarn": ("olmo3", {"rope_scaling": YARN, "rope_theta": 10000, "max_position_embeddings": 65536}),
    "olmo3-length": ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "max_position_embeddings": 65536}),
    "olmo3-ignored": ("olmo3", {"rope_scaling": YARN, "original_max_position_embeddings": 4096}),
    "smollm3-interval": ("smollm3", {"no_rope_layer_interval": 2, "rope_scaling": YARN}),
    "smollm3-windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [0, 1, 0, 1]}),
    "ministral3-theta": ("ministral3", {"rope_theta": 10000, "rope_scaling": YARN}),
    "granite-theta": ("granite", {"rope_theta": 10_000_000.0, "attention_multiplier": 0.0078125}),
}


def of_kind(kind: str, **keys: Any) -> dict[str, Any]:
    """A small config.json of a model type, which has the keys that it must have and these."""
    return {**COMMON, **REQUIRED.get(kind, {}), "model_type": kind, **keys}


def settings(spec: ModelSpec) -> list[dict[str, Any]]:
    """The settings of each layer."""

    def of_mixer(mixer: Any, eps: float) -> dict[str, Any]:
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
    eps = {norm.variance_epsilon for norm in model.modules() if hasattr(norm, "variance_epsilon")}

    def of_layer(attention) -> dict[str, Any]:
        kind = f"{attention.attention_type}_" if hasattr(attention, "attention_type") else ""  # OLMo 3
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

    return [of_layer(layer.self_attn) for layer in model.model.layers]


def preset(name: str) -> dict[str, Any]:
    """A preset with its first four layers."""
    config = read_config(locate(name))
    lists = {key: config[key][:4] for key in ("layer_types", "no_rope_layers") if key in config}
    return {**config, **lists, "num_hidden_layers": 4}


ALIASES = {  # of the number of experts
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "gpt_oss": ("num_local_experts", "num_experts"),
    "glm4_moe": ("n_routed_experts", "num_local_experts"),
    "minimax_m2": ("num_local_experts", "num_experts"),
}


def aliased() -> dict[str, dict[str, Any]]:
    """Configs with the other name of the number of experts, alone and beside the usual one with another number."""
    cases = {}
    for kind, (key, alias) in ALIASES.items():
        config = of_kind(kind)
        cases[f"{kind}-both"] = {**config, alias: 4}
        cases[f"{kind}-both-reversed"] = {alias: 4, **config}
        del config[key]
        cases[f"{kind}-alias"] = {**config, alias: 5}
    return cases


CASES = {
    **aliased(),
    **{kind: of_kind(kind) for kind in registry.MODEL_TYPES if kind != "mistral3"},
    **{name: of_kind(kind, **keys) for name, (kind, keys) in SPELLINGS.items()},
    **{f"preset-{name}": preset(name) for name in presets()},
}


@pytest.mark.parametrize("case", CASES)
def test_configs_are_read_as_transformers_reads_them(case) -> None:
    spec = registry.build(CASES[case])
    model = theirs(deepcopy(CASES[case]), "meta")
    assert settings(spec) == settings_of(model)
    assert sizes_of(spec) == parameters_by_unit(model)
    extra = [getattr(model.config, key, 0) for key in ("num_nextn_predict_layers", "num_mtp_modules")]
    assert len(spec.carried) == sum(extra)


def test_truncate_is_refused_where_transformers_does_not_read_it() -> None:
    registry.build(of_kind("olmo3", rope_scaling={**YARN, "truncate": True}))
    with pytest.raises(UserError, match="truncate false of the rotary embedding is not supported"):
        registry.build(of_kind("olmo3", rope_scaling={**YARN, "truncate": False}))
