"""What `lora.target_modules`, `target_parameters` and `modules_to_save` mean, and what is said where they cannot be."""

import pytest

from rptrain.models.families import registry
from rptrain.models.transforms.lora import LoRA, target_names, with_lora
from rptrain.utils.errors import UserError
from tests.families import VARIANTS
from tests.models.conftest import COMMON

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SEVEN = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("LlamaForCausalLM", {"r": 0}, "lora.r must be at least 1, not 0"),
        (
            "LlamaForCausalLM",
            {"target_modules": ("q_prj",)},
            f"matches 'q_prj'; did you mean 'q_proj'?; there are {SEVEN}",
        ),
        (
            "LlamaForCausalLM",
            {"target_modules": "all"},
            f"matches 'all'; did you mean 'all-linear'?; there are {SEVEN}",
        ),
        (
            "LlamaForCausalLM",
            {"target_modules": "q_proj"},
            'q_proj is a pattern that must match whole module names; write ["q_proj"] for the modules whose names end',
        ),
        (
            "LlamaForCausalLM",
            {"target_modules": ("all-linear",)},
            '"all-linear" cannot be in a list: write target_modules = "all-linear"',
        ),
        ("LlamaForCausalLM", {"target_modules": "("}, "'(' is not a valid pattern: missing ), unterminated subpattern"),
        (
            "LlamaForCausalLM",
            {"target_modules": "a{4294967296}"},
            "is not a valid pattern: the repetition number is too",
        ),
        (
            "LlamaForCausalLM",
            {"target_modules": ("q_proj", "lm_head")},
            "'lm_head' matches lm_head, which can have no adapter, but can be trained whole: name it in lora.mod",
        ),
        ("LlamaForCausalLM", {"target_modules": ".*"}, "'.*' matches model.embed_tokens, which can have no adapter"),
        (
            "Qwen3MoeForCausalLM",
            {"target_modules": ("q_proj", "down_proj")},
            "'down_proj' matches model.layers.0.mlp.experts.0.down_proj, which can have an adapter only by "
            'lora.target_parameters = ["mlp.experts.down_proj"]; there are q_proj, ',
        ),
        (
            "Glm4MoeForCausalLM",
            {"target_modules": ("up_proj",)},
            "'up_proj' matches model.layers.0.mlp.up_proj, which can have an adapter only by lora.target_parameters = "
            '["mlp.up_proj.weight", "mlp.experts.gate_up_proj", "mlp.shared_experts.up_proj.weight"]; there are q_proj',
        ),
        (
            "Glm4MoeForCausalLM",
            {"target_modules": ("mlp.gate",)},
            "'mlp.gate' matches model.layers.1.mlp.gate, which can have no adapter; there are q_proj, ",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"target_modules": ("mlp.gate",)},
            "'mlp.gate' matches model.layers.0.mlp.gate, which can have no adapter, but can be trained whole: name it",
        ),
        (
            "Glm4MoeForCausalLM",
            {"modules_to_save": ("gate",)},
            "lora.modules_to_save: 'gate' matches model.layers.1.mlp.gate, a router with a correction bias, which ",
        ),
        (
            "MiniMaxM2ForCausalLM",
            {"modules_to_save": ("gate",)},
            "matches model.layers.0.block_sparse_moe.gate, a router with a correction bias",
        ),
        (
            "Glm4MoeForCausalLM",
            {"target_parameters": ("gate_proj",)},
            "no parameter of an MLP matches 'gate_proj'; available: mlp.gate_proj.weight, mlp.up_proj.weight, "
            "mlp.down_proj.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.shared_experts.gate_proj.weigh",
        ),
        (
            "Glm4MoeForCausalLM",
            {"target_parameters": ("q_proj.weight",)},
            "'q_proj.weight' matches model.layers.0.self_attn.q_proj.weight, which can have no adapter by this key; "
            "available: mlp.gate_proj.weight, ",
        ),
        (
            "Glm4MoeForCausalLM",
            {"target_parameters": ("mlp.down_proj.weight",), "modules_to_save": ("mlp.down_proj",)},
            "mlp.down_proj has an adapter by lora.target_modules or lora.target_parameters, and is also in lora",
        ),
        (
            "MiniMaxM2ForCausalLM",
            {"target_parameters": ("shared_experts.down_proj.weight",)},
            "available: mlp.experts.gate_up_proj, mlp.experts.down_proj; lora.target_modules names attention modules",
        ),
        ("Glm4MoeForCausalLM", {"target_parameters": ("up_proj.weight",), "use_dora": True}, "set lora.use_dora = fal"),
        (
            "LlamaForCausalLM",
            {"target_parameters": ("mlp.down_proj.weight",)},
            "'mlp.down_proj.weight': this model has no experts; use lora.target_modules",
        ),
        (
            "GptOssForCausalLM",
            {"target_parameters": ("experts.down_proj_bias",)},
            "'experts.down_proj_bias' matches model.layers.0.mlp.experts.down_proj_bias, which can have no adapter by "
            "this key; available: mlp.experts.gate_up_proj, mlp.experts.down_proj; lora.target_modules names attention",
        ),
        ("GptOssForCausalLM", {"target_parameters": EXPERTS, "lora_dropout": 0.1}, "set lora.lora_dropout = 0"),
        ("GptOssForCausalLM", {"target_parameters": EXPERTS, "use_dora": True}, "set lora.use_dora = false"),
        ("GptOssForCausalLM", {"target_modules": ()}, "match nothing that can have an adapter"),
        ("LlamaForCausalLM", {"modules_to_save": ("head",)}, "lora.modules_to_save: no module matches 'head'; did you"),
        (
            "LlamaForCausalLM",
            {"target_modules": ("v_proj",), "modules_to_save": ("q_proj",)},
            "model.layers.0.self_attn.q_proj cannot be trained without model.layers.0.self_attn.k_proj, model.layers.0",
        ),
        (
            "LlamaForCausalLM",
            {"modules_to_save": ("o_proj",)},
            "model.layers.0.self_attn.o_proj has an adapter by lora",
        ),
    ],
)
def test_what_cannot_be_is_refused(architecture, settings, message, fresh) -> None:
    with pytest.raises(UserError) as caught:
        with_lora(fresh(architecture).spec, LoRA(**settings))
    assert message in str(caught.value)


def test_the_head_of_a_tied_model_is_named_by_the_embedding(fresh) -> None:
    spec = fresh("LlamaForCausalLM", tie_word_embeddings=True).spec
    with pytest.raises(UserError, match="lm_head is tied to the embedding in this model: write embed_tokens"):
        with_lora(spec, LoRA(modules_to_save=("lm_head",)))
    for targets in ("lm_head", ("q_proj", "lm_head")):
        with pytest.raises(UserError, match=r"target_modules: lm_head is tied to the embedding .* neither can have an"):
            with_lora(spec, LoRA(target_modules=targets))
    assert [u.name for u in with_lora(spec, LoRA(modules_to_save=("embed_tokens",))).units if u.trainable] == [
        "embed",
        "layers.0.lora",
        "layers.1.lora",
    ]


def test_names_for_peft_mean_these_modules_and_no_others(fresh) -> None:
    spec = fresh("LlamaForCausalLM").spec
    for settings, names in (
        (LoRA(), SEVEN.split(", ")),
        (LoRA(target_modules=r".*\.o_proj"), ["o_proj"]),
        (LoRA(target_modules=r".*\.1\..*\.o_proj"), ["model.layers.1.self_attn.o_proj"]),
    ):
        assert target_names(with_lora(spec, settings)) == names


@pytest.mark.parametrize("name", VARIANTS)
def test_every_class_with_experts_is_known(name) -> None:
    spec = registry.build({**COMMON, **VARIANTS[name]})
    assert spec.has_experts == (any(layer.expert_products for layer in spec.layers) or name == "glm4-moe-dense")
