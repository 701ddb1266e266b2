import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rptrain.models.families import registry
from rptrain.models.layer import QueryScaling
from rptrain.models.layers import rope
from rptrain.models.locate import PRESETS, how_to_complete, locate, presets, read_config
from rptrain.utils.errors import UserError
from tests.families import FAMILIES

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GRANITE = {**CONFIG, "architectures": ["GraniteForCausalLM"]}
PHI3 = {**CONFIG, "architectures": ["Phi3ForCausalLM"]}
SEED_OSS = {**CONFIG, "architectures": ["SeedOssForCausalLM"]}
SMOLLM3 = {**CONFIG, "architectures": ["SmolLM3ForCausalLM"]}
GROUPED = {**CONFIG, "num_key_value_heads": 2}
MISTRAL = {**GROUPED, "architectures": ["MistralForCausalLM"]}
QWEN2 = {**GROUPED, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**GROUPED, "architectures": ["Qwen3ForCausalLM"]}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MOE = {**EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
GLM = {**EXPERTS, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 6}
MINIMAX = {**EXPERTS, "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4}
GPT_OSS = {**EXPERTS, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4}
ORIGINAL = "original_max_position_embeddings"
YARN = {"max_position_embeddings": 4096}  # the length of the original context
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def small(kind: str) -> dict[str, Any]:
    """A config of a family that can be built."""
    return {**GROUPED, **FAMILIES[kind].required, "architectures": [registry.MODEL_TYPES[kind]]}


@pytest.mark.parametrize(
    ("preset", "layers", "tied"),
    [
        ("qwen3-1.7b", 28, True),
        ("llama-3.1-8b", 32, False),
        ("qwen3-32b", 64, False),
        ("qwen2.5-7b", 28, False),
        ("mistral-7b", 32, False),
        ("smollm3-3b", 36, True),
    ],
)
def test_layers_and_work_of_presets(preset, layers, tied) -> None:
    spec = registry.build(read_config(locate(preset)))
    assert (len(spec.layers), spec.tied) == (layers, tied)
    assert [layer.name for layer in spec.stack] == [*(f"layers.{i}" for i in range(layers)), "head"]
    assert [unit.name for unit in spec.units] == [
        "embed", *(f"layers.{i}" for i in range(layers)), "norm", *([] if tied else ["head"])
    ]  # fmt: skip
    works = [layer.work(4096, 4096, 2) for layer in spec.stack]
    forward, backward = (sum(work.flops for work in pass_) for pass_ in zip(*works, strict=True))
    block = spec.units[1].params
    matrices = sum(p.numel for p in block if p.decay) * layers + spec.vocab_size * spec.hidden_size
    attention = 2 * 4096 * 4097 * spec.layers[0].mixer.heads * 128 * layers
    assert (forward, backward) == (2 * 4096 * matrices + attention, 2 * forward)


def test_norms_do_not_decay_and_start_at_one() -> None:
    spec = registry.build({**QWEN3, "initializer_range": 0.1})
    for unit in spec.units:
        for param in unit.params:
            norm = param.name.endswith("norm")
            assert (param.decay, param.std) == ((False, None) if norm else (True, 0.1)), param.name
            assert sum(part.rows for part in param.parts) == param.shape[0]


def test_defaults() -> None:
    attention = registry.build(CONFIG).layers[0].mixer
    assert (attention.head_size, attention.kv_heads, attention.eps, attention.qk_norm) == (4, 4, 1e-6, False)
    attention = registry.build(QWEN3).layers[0].mixer
    assert (attention.head_size, attention.qk_norm) == (128, True)
    by_type = {key: value for key, value in CONFIG.items() if key != "architectures"} | {"model_type": "llama"}
    assert registry.build(by_type).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "spelled",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {
            "rope_parameters": {"rope_theta": 1.0},
            "rope_scaling": {"type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ],
    ids=["rope_type", "type", "parameters", "both"],
)
def test_every_spelling_of_llama3_rope(spelled) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec = registry.build({**CONFIG, "head_dim": 64, **spelled})
    theirs = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert torch.equal(torch.tensor(spec.rotaries[0].inv_freq), LlamaRotaryEmbedding(theirs).inv_freq)


@pytest.mark.sample(10)
@pytest.mark.parametrize("head_size", [10, 64, 128])
@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        {"factor": 4.0},
        {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 64},
        {"factor": 40, "mscale": 0.7},
        {"factor": 8.0, "attention_factor": 1.5},
        {"factor": 1.0},
        {"factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0},
        {"factor": 4.0, "original_max_position_embeddings": 4},
        {"factor": None, "original_max_position_embeddings": 64},
        {"factor": 4.0, "beta_fast": 1.0, "truncate": False},
    ],
)
@pytest.mark.parametrize("theta", [150000.0, 10.0])
def test_yarn_is_that_of_transformers(settings, theta, head_size) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    settings = {"rope_type": "yarn", "rope_theta": theta, **settings}
    lengths = {"max_position_embeddings": 4096}
    theirs = GptOssRotaryEmbedding(GptOssConfig(head_dim=head_size, rope_parameters=dict(settings), **lengths))
    ours = rope.parameters({**CONFIG, "rope_scaling": settings, **lengths})
    assert rope.problems(ours, head_size) == []
    inv_freq = torch.tensor(rope.inverse_frequencies(ours, head_size))
    assert torch.equal(inv_freq, theirs.inv_freq)
    assert rope.attention_factor(ours) == pytest.approx(theirs.attention_scaling, rel=1e-14)
    positions = torch.tensor([0, 1, 77, 4095])
    for table, expected in zip(
        rope.tables(inv_freq, positions, rope.attention_factor(ours))[:2],
        theirs(torch.ones(1), positions[None]),
        strict=True,
    ):
        torch.testing.assert_close(table, expected[0], rtol=1e-6, atol=1e-6)


def test_yarn() -> None:
    settings = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    spec = registry.build({**CONFIG, "head_dim": 64, **YARN, "rope_parameters": settings})
    (rotary,) = spec.rotaries
    assert rotary.factor == pytest.approx(1.138629436111989)
    assert rotary.inv_freq[0] == 1 and rotary.inv_freq[-1] == pytest.approx(10000.0 ** (-62 / 64) / 4)


@pytest.mark.parametrize("spelled", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6}}])
def test_plain_rope(spelled) -> None:
    inv_freq = registry.build({**CONFIG, "head_dim": 8, **spelled}).rotaries[0].inv_freq
    assert inv_freq == pytest.approx([1, 1e6**-0.25, 1e6**-0.5, 1e6**-0.75])


def test_rope_tables_are_of_the_asked_precision() -> None:
    positions = torch.tensor([0, 1, 1000])
    cos, sin, _ = rope.tables(torch.tensor([1.0, 0.5], dtype=torch.float64), positions)
    angles = positions.double()[:, None] * torch.tensor([1.0, 0.5], dtype=torch.float64)
    assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())
    assert rope.tables(torch.ones(1), positions)[0].dtype == torch.float32


@pytest.mark.parametrize("config", [{**GLM, "num_nextn_predict_layers": 2}, {**MINIMAX, "num_mtp_modules": 2}])
def test_layers_for_multi_token_prediction_are_carried(config) -> None:
    spec = registry.build(config)
    layers = config["num_hidden_layers"]
    carried = [index for index in range(9) if spec.carries(f"model.layers.{index}.eh_proj.weight")]
    assert carried == [layers, layers + 1]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**CONFIG, "rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
        ({**CONFIG, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({**CONFIG, **YARN, "rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": "32"}}, "beta_fast.*'32'"),
        ({**CONFIG, **YARN, "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 0}}, "truncate.*not 0"),
        ({**CONFIG, **YARN, "rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1}, "above 1"),
        ({**CONFIG, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by layer type"),
        ({**CONFIG, "rope_scaling": {"type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({**CONFIG, "rope_theta": "big"}, "rope_theta"),
        ({**CONFIG, "rope_theta": 10**400}, "rope_theta"),
        ({**CONFIG, "rope_theta": math.inf}, "rope_theta"),
        ({**CONFIG, "rope_scaling": "yarn"}, "rope_scaling"),
        ({**CONFIG, "rope_parameters": 3}, "rope_scaling"),
        ({**CONFIG, "rope_parameters": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not supported"),
        ({**CONFIG, **YARN, "rope_scaling": {"type": "yarn", ORIGINAL: 0}}, f"{ORIGINAL} .* positive number, not 0"),
        ({**CONFIG, **YARN, "rope_scaling": {"type": "yarn", "factor": 10**400}}, "factor .* positive number"),
        ({**CONFIG, "rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "below high_freq_factor"),
        ({**CONFIG, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({**CONFIG, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**CONFIG, "attention_bias": "yes"}, "attention_bias must be true or false, not 'yes'"),
        ({**CONFIG, "mlp_bias": True}, "mlp_bias"),
        ({**CONFIG, "attention_dropout": 0.1}, "attention_dropout"),
        ({**CONFIG, "quantization_config": {"bits": 4}}, "quantized"),
        ({**CONFIG, "vocab_size": None}, "vocab_size"),
        ({**CONFIG, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**CONFIG, "hidden_size": "16"}, "hidden_size"),
        ({**CONFIG, "hidden_size": 18}, "not a multiple of num_attention_heads"),
        ({**CONFIG, "num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({**CONFIG, "head_dim": 5}, "head_dim"),
        ({**CONFIG, "head_dim": 1024}, "head_dim"),
        ({**CONFIG, "hidden_size": 2056}, "head_dim"),
        ({**CONFIG, "architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported are"),
        *(
            ({**config, "model_type": kind}, f"architectures names {name}ForCausalLM, but model_type '{kind}' names an")
            for config, name, kind in (
                (CONFIG, "Llama", "granite"),
                (CONFIG, "Llama", "cohere"),
                (CONFIG, "Llama", "gemma"),
                (MISTRAL, "Mistral", "mixtral"),
                (QWEN2, "Qwen2", "qwen2_moe"),
                (PHI3, "Phi3", "phimoe"),
            )
        ),
        ({**CONFIG, "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "llava"}, "'llava' names"),
        ({"model_type": "gemma"}, "'gemma'"),
        ({**CONFIG, "model_type": ["llama"]}, r"model_type \['llama'\] names another model"),
        ({}, "no architecture named"),
        *(
            ({**small(kind), **settings}, problem)
            for kind, cases in FAMILIES.items()
            for settings, problem in cases.refused
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config, named) -> None:
    with pytest.raises(UserError, match=named):
        registry.build(config)


@pytest.mark.parametrize("size", [10**12, 10**30], ids=["1e12", "1e30"])
@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((CONFIG, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")),
        *((CONFIG, key) for key in ("num_attention_heads", "num_key_value_heads")),
        *((MOE, key) for key in ("moe_intermediate_size", "num_experts")),
        *((GPT_OSS, key) for key in ("num_local_experts", "sliding_window")),
        *((GLM, key) for key in ("n_routed_experts", "n_shared_experts", "num_nextn_predict_layers")),
    ],
)
def test_sizes_beyond_any_sense(config, key, size) -> None:
    """One line each, at once."""
    with pytest.raises(UserError) as caught:
        registry.build({**config, key: size})
    (_, *problems) = str(caught.value).splitlines()
    assert [problem.startswith(f"- {key} is at most ") for problem in problems] == [True], problems


@pytest.mark.parametrize("value", [math.inf, math.nan, 10**400, -1.0], ids=["inf", "nan", "too-large", "negative"])
@pytest.mark.parametrize("key", ["rms_norm_eps", "initializer_range"])
def test_numbers_that_are_none(key, value) -> None:
    with pytest.raises(UserError, match=f"\n- {key} (is at most|must be a positive number)") as caught:
        registry.build({**CONFIG, key: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (CONFIG, "tie_word_embeddings"),
        (QWEN2, "use_sliding_window"),
        (QWEN2, "attention_bias"),
        (MOE, "norm_topk_prob"),
    ],
)
def test_flags_that_are_text(config, key) -> None:
    with pytest.raises(UserError, match=f"{key} must be true or false, not 'false'"):
        registry.build({**config, key: "false"})


@pytest.mark.parametrize("numbers", [[2], [-1], [True], [0.0], 1])
def test_layers_without_experts_that_are_none(numbers) -> None:
    with pytest.raises(UserError, match="mlp_only_layers must be a list of layers' numbers, from 0 to 1, not "):
        registry.build({**MOE, "mlp_only_layers": numbers})


def windows(config) -> list[int | None]:
    return [layer.mixer.window for layer in registry.build(config).layers]


@pytest.mark.parametrize("qwen", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [None, None]),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 8}, [None, None]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [4096, 4096]),
        (WINDOWS, [None, 8]),
        ({**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}, [8, None]),
    ],
)
def test_windows_of_qwen(qwen, settings, expected) -> None:
    """As transformers reads the same config.json."""
    from transformers import AutoConfig

    assert windows({**qwen, **settings}) == expected
    model_type = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}[qwen["architectures"][0]]
    theirs = AutoConfig.for_model(model_type, **{**qwen, **settings})
    assert [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types] == expected


def test_defaults_of_mistral() -> None:
    """What config.json leaves out is what transformers takes; null is no window."""
    from transformers import MistralConfig

    left_out = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    block = registry.build({**left_out, "num_attention_heads": 8}).layers[0]
    theirs = MistralConfig()
    assert (block.mixer.window, block.mixer.kv_heads, block.norms.eps) == (
        theirs.sliding_window, theirs.num_key_value_heads, theirs.rms_norm_eps
    )  # fmt: skip
    assert windows({**MISTRAL, "sliding_window": None}) == [None, None]


def test_every_architecture_is_compared_with_transformers_and_in_the_guide() -> None:
    assert {registry.MODEL_TYPES[kind] for kind in FAMILIES} == registry.FAMILIES.keys()
    guide = (Path(__file__).parents[2] / "docs/guide/models.md").read_text(encoding="utf-8")
    known = {*registry.FAMILIES, *registry.TOWERS}  # tests/train/test_text_towers.py compares the latter
    assert set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)) == known
    assert [preset for preset in presets() if f"`{preset}`" not in guide] == []


def test_ministral_3_as_transformers_reads_it() -> None:
    """Defaults replace a null, and a scaling of 0 is none."""
    ministral = {**CONFIG, "num_key_value_heads": 2, "architectures": ["Ministral3ForCausalLM"], "head_dim": 8}
    (default,) = registry.build({**ministral, "rope_parameters": None}).rotaries
    assert default == registry.build(ministral).rotaries[0]
    assert default.query_scaling == QueryScaling(0.1, 16384.0) and default.inv_freq[-1] < 1e-5
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0}
    off = {**yarn, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0}
    (rotary,) = registry.build({**ministral, "rope_parameters": off}).rotaries
    assert rotary.query_scaling is None and rotary.factor == pytest.approx(1.138629436111989)
    for layer_types, window in (("full_attention", None), ("sliding_attention", 4)):
        registry.build({**ministral, "sliding_window": window, "layer_types": [layer_types] * 2})
    with pytest.raises(UserError, match="layer_types must be sliding_attention for all layers"):
        registry.build({**ministral, "sliding_window": 4, "layer_types": ["full_attention"] * 2})


def test_all_problems_at_once() -> None:
    with pytest.raises(UserError) as caught:
        registry.build({**CONFIG, "hidden_act": "gelu", "mlp_bias": True, "vocab_size": -1})
    assert all(word in str(caught.value) for word in ("gelu", "mlp_bias", "vocab_size"))


@pytest.mark.parametrize("kind", FAMILIES)
def test_one_line_for_a_flag_of_another_type(kind) -> None:
    with pytest.raises(UserError) as caught:
        registry.build({**small(kind), "attention_bias": "abc"})
    (_, *problems) = str(caught.value).splitlines()
    assert [problem for problem in problems if "attention_bias" in problem] == [
        "- attention_bias must be true or false, not 'abc'"
    ]


@pytest.mark.parametrize("kind", ["longrope", "yarn", "llama3"])
def test_one_line_for_an_unsupported_rope_type_of_phi_3(kind) -> None:
    with pytest.raises(UserError) as caught:
        registry.build({**PHI3, "rope_scaling": {"type": kind}})
    (_, *problems) = str(caught.value).splitlines()
    assert problems == [f"- rope type {kind!r} is not supported in this architecture; default is"]


def test_locate(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        locate(str(model))
    (model / "config.json").write_text("{}")
    assert locate(str(model)) == model
    assert locate("qwen3-1.7b") == PRESETS / "qwen3-1.7b"
    for wrong in ("qwen-1.7b", "../../no", "/nowhere/at/all", ""):
        with pytest.raises(UserError, match=r"qwen3-1\.7b") as caught:
            locate(wrong)
        assert "rptrain download" not in str(caught.value)
    with pytest.raises(UserError, match=r"Did you mean 'qwen3-1\.7b'"):
        locate("Qwen3-1.7B")
    with pytest.raises(UserError, match=r"rptrain download Qwen/Qwen3-1\.7B$") as caught:
        locate("Qwen/Qwen3-1.7B")
    assert "qwen3-1.7b" not in str(caught.value), "a preset has no weights"
    assert how_to_complete(Path("hub/models--org--a-b/snapshots/0")).endswith("missing: rptrain download org/a-b")
    assert how_to_complete(model) == ""


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_locate_in_the_hub_cache(variable, tmp_path, monkeypatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    hub = tmp_path / below.get(variable, ".cache/huggingface/hub")
    repository = hub / "models--org--name"
    for commit in ("aaa", "bbb"):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("aaa\n")
    assert locate("org/name") == repository / "snapshots" / "aaa"
    (repository / "refs" / "main").write_text("gone")
    assert locate("org/name").parent == repository / "snapshots"


def test_read_config_errors(tmp_path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for text, problem in (("{", "not valid JSON"), ("[]", "JSON object, not a list")):
        file.write_text(text)
        with pytest.raises(UserError, match=problem):
            read_config(tmp_path)
    file.write_text(json.dumps(CONFIG))
    assert read_config(tmp_path) == read_config(file) == CONFIG


@pytest.mark.parametrize("name", ["MistralModel", "MistralForSequenceClassification"])
def test_models_of_a_family_with_another_head_or_none(name) -> None:
    """AutoModelForCausalLM of transformers loads them, too. Models of other names may compute something else."""
    config = {**MISTRAL, "model_type": "mistral"}
    assert registry.build({**config, "architectures": [name]}).architecture == "MistralForCausalLM"
    for other in (f"X{name}", "MistralForSomething", "LlamaModel"):
        with pytest.raises(UserError, match=f"'{other}' is not supported"):
            registry.build({**config, "architectures": [other]})
