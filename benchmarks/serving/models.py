"""Tiny models of each family, in sizes that vLLM computes on the CPU, and the adapters that are trained on them.

vLLM's attention on the CPU takes heads of 32, 64, 80, 96, 112, 128, 160, 192, 224 or 256; its adapters have ranks up to
`max_lora_rank`, which is one of a list (8, 16, 32, ...).
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rptrain.models.locate import PRESETS

PRESET = PRESETS / "tiny-tasks"
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
DELTA_NETS = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
}
SHARED = {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": LLAMA3},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "head_dim": None,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "head_dim": None,
        "tie_word_embeddings": True,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": YARN,
        "attention_bias": True,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **EXPERTS,
        **SHARED,
        **DELTA_NETS,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **DELTA_NETS,
        "tie_word_embeddings": True,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "head_dim": None,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "head_dim": None,
        "no_rope_layers": [1, 0],
        "tie_word_embeddings": True,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "head_dim": None},
    "seed-oss": {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.2},
    },
}
# The [lora] tables, by the name under which vLLM serves the adapter.
DENSE: Mapping[str, tuple[str, ...]] = {
    "lora": ("lora.r=8", "lora.lora_alpha=16"),
    "rslora": ("lora.r=16", "lora.lora_alpha=16", "lora.use_rslora=true"),
}
DORA = ("lora.r=8", "lora.lora_alpha=16", "lora.use_dora=true")
OF_EXPERTS = (
    "lora.r=4",
    "lora.lora_alpha=8",
    'lora.target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]',
)


def has_experts(name: str) -> bool:
    return bool(MODELS[name].keys() & {"num_experts", "num_local_experts", "n_routed_experts"})


def write_model(name: str, folder: Path) -> None:
    """Writes the config and the tokenizer of a model, without weights."""
    shutil.copytree(PRESET, folder, ignore=shutil.ignore_patterns("config.json"))
    preset = json.loads((PRESET / "config.json").read_text())
    config = {"vocab_size": preset["vocab_size"], "tie_word_embeddings": False, **COMMON, **MODELS[name]}
    made = {key: value for key, value in config.items() if key != "head_dim" or value is not None}
    (folder / "config.json").write_text(json.dumps(made, indent=2))
