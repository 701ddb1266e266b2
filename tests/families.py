"""The cases of each family of models, by model_type, for tests of models, of the engine and of runs."""

from collections.abc import Mapping

from tests.family_cases import BOTH_KINDS, LONG_YARN, QWEN3_EXPERTS, Cases, Settings
from tests.hybrid_families import HYBRIDS

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED_QUERIES = {**YARN, "llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 5}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
GPT_OSS_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 4}
GLM_EXPERTS = {
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "routed_scaling_factor": 1.7,
}
MINIMAX_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3}

FAMILIES: Mapping[str, Cases] = {
    "llama": Cases(
        variants={
            "llama": {},
            "llama-tied": {"tie_word_embeddings": True, "head_dim": 10},
            "llama3-rope": {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5},
            "llama-yarn": {"rope_parameters": YARN},
            "llama-biases": {"attention_bias": True},
        },
        spellings={"llama-type": {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 4096}},
        not_null=("attention_bias", "mlp_bias"),
        presets={"llama-3.1-8b": 8_030_261_248},
    ),
    "granite": Cases(
        variants={
            "granite": {
                "attention_multiplier": 0.7,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.4,
                "logits_scaling": 1.7,
            },
            "granite-tied": {"tie_word_embeddings": True, "attention_bias": True, "attention_multiplier": 0.3},
        },
        layers={
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.7,
        },
        engine={
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
        run={
            "tie_word_embeddings": True,
            "attention_multiplier": 0.4,
            "embedding_multiplier": 1.2,
            "residual_multiplier": 0.8,
            "logits_scaling": 0.8,
        },
        spellings={"granite-theta": {"rope_theta": 10_000_000.0, "attention_multiplier": 0.0078125}},
        not_null=("attention_multiplier",),
        refused=[({"residual_multiplier": 0}, "residual_multiplier must be a positive number, not 0")],
        presets={"granite-3.3-8b": 8_170_864_640},
    ),
    "seed_oss": Cases(
        variants={
            "seed-oss": {"head_dim": 10, "attention_out_bias": True},
            "seed-oss-no-bias": {"head_dim": 6, "attention_bias": False, "tie_word_embeddings": True},
        },
        engine={"attention_bias": True, "attention_out_bias": True},
        run={"attention_bias": True},
        not_null=("attention_bias", "attention_out_bias"),
        padding=1,
        presets={"seed-oss-36b": 36_151_104_512},
    ),
    "smollm3": Cases(
        variants={
            "smollm3": {"no_rope_layer_interval": 2},
            "smollm3-windows": {
                "use_sliding_window": True,
                "sliding_window": 4,
                "no_rope_layers": [0, 1],
                "tie_word_embeddings": False,
            },
            "smollm3-biases": {"no_rope_layers": [1, 1], "attention_bias": True},
        },
        engine={"no_rope_layer_interval": 2, "tie_word_embeddings": True},
        run={"tie_word_embeddings": True, "no_rope_layer_interval": 2},
        spellings={
            "smollm3-interval": {"no_rope_layer_interval": 2, "rope_scaling": LONG_YARN},
            "smollm3-windows": {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [0, 1, 0, 1]},
        },
        not_null=("use_sliding_window", "no_rope_layer_interval", "rope_theta"),
        refused=[
            ({"no_rope_layers": [1]}, "no_rope_layers must be a list of 0 or 1 for each of 2 layers"),
            ({"no_rope_layers": [1, 2]}, "no_rope_layers must be a list of 0 or 1 for each of 2 layers"),
            ({"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive whole number"),
        ],
        padding=128_004,
        presets={"smollm3-3b": 3_075_098_624},
    ),
    "olmo3": Cases(
        variants={
            "olmo3": {"sliding_window": 4, "layer_types": BOTH_KINDS},
            "olmo3-yarn": {
                "sliding_window": 4,
                "layer_types": BOTH_KINDS,
                "rope_scaling": YARN,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
        },
        layers={"sliding_window": 4, "layer_types": BOTH_KINDS},
        engine={"sliding_window": 4},
        run={"sliding_window": 4},
        spellings={
            "olmo3-yarn": {"rope_scaling": LONG_YARN, "rope_theta": 10000, "max_position_embeddings": 65536},
            "olmo3-length": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "max_position_embeddings": 65536},
            "olmo3-ignored": {"rope_scaling": LONG_YARN, "original_max_position_embeddings": 4096},
            "olmo3-truncate": {"rope_scaling": {**LONG_YARN, "truncate": True}},
        },
        not_null=("attention_bias",),
        refused=[
            ({"sliding_window": None}, "sliding_window is missing"),
            ({"rope_scaling": "yarn"}, "rope_scaling must be a JSON object, not 'yarn'"),
            *(
                ({"rope_parameters": value}, "rope_parameters must be a JSON object with an object each for")
                for value in ("yarn", {"full_attention": 3}, {"rope_type": "yarn", "factor": 8.0})
            ),
            (
                {"rope_scaling": {**LONG_YARN, "truncate": False}},
                "truncate false of the rotary embedding is not supported",
            ),
            *(
                (settings, "rope_theta of the rotary embedding must be a positive number, not None")
                for settings in ({"rope_theta": None}, {"rope_scaling": {"rope_theta": None}})
            ),
        ],
        padding=1,
        presets={"olmo-3-7b": 7_298_011_136, "olmo-3-32b": 32_233_522_176},
    ),
    "phi3": Cases(
        variants={
            "phi3": {"sliding_window": 4},
            "phi3-partial": {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
        },
        engine={"partial_rotary_factor": 0.5},
        run={"sliding_window": 6},
        spellings={"phi3-partial": {"partial_rotary_factor": 0.75, "rope_theta": 250_000}},
        refused=[
            ({"resid_pdrop": 0.1}, "resid_pdrop 0.1 is not supported; it must be off"),
            ({"partial_rotary_factor": 0.3}, "partial_rotary_factor is at most 1, and times the head size 4 an"),
            ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is at most 1"),
        ],
        padding=32000,
        presets={"phi-4": 14_659_507_200},
    ),
    "mistral": Cases(
        variants={
            "mistral": {"head_dim": 10, "sliding_window": 4},
            "mistral-no-window": {"sliding_window": None, "tie_word_embeddings": True},
        },
        layers={"sliding_window": 4},
        run={"sliding_window": 4},
        spellings={"mistral-full": {"sliding_window": None, "head_dim": None}},
        not_null=("num_key_value_heads",),
        refused=[
            ({"attention_bias": True}, "attention_bias True is not supported; it must be off"),
            ({"sliding_window": "4096"}, "sliding_window must be a positive whole number, not '4096'"),
            ({"sliding_window": 0}, "sliding_window must be a positive whole number, not 0"),
            (
                {"layer_types": BOTH_KINDS},
                "layer_types must be sliding_attention for all layers, because sliding_window is 4096",
            ),
            (
                {"sliding_window": None, "layer_types": 3},
                "layer_types must be full_attention for all layers, because sliding_window is null",
            ),
        ],
        presets={"mistral-7b": 7_241_732_096, "mistral-small-24b": 23_572_403_200},
    ),
    "ministral3": Cases(
        variants={
            "ministral3": {"head_dim": 10, "rope_parameters": SCALED_QUERIES},
            "ministral3-window": {
                "head_dim": 6,
                "sliding_window": 5,
                "rope_parameters": {**SCALED_QUERIES, "rope_type": "default"},
                "tie_word_embeddings": True,
            },
        },
        layers={"rope_parameters": {**SCALED_QUERIES, "rope_type": "default", "llama_4_scaling_beta": 0.2}},
        engine={
            "rope_parameters": {"rope_theta": 1e4, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
        },
        run={
            "rope_parameters": {"rope_theta": 1e4, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.4}
        },
        spellings={"ministral3-theta": {"rope_theta": 10000, "rope_scaling": LONG_YARN}},
        not_null=("num_key_value_heads", "head_dim"),
        padding=11,
        presets={"ministral-3-8b": 8_489_553_920},
    ),
    "qwen2": Cases(
        variants={"qwen2": {}, "qwen2-tied": {"tie_word_embeddings": True, **WINDOWS}},
        layers=WINDOWS,
        run={"tie_word_embeddings": True, "attention_bias": True, **WINDOWS},
        spellings={"qwen2-windows": {"use_sliding_window": True, "max_window_layers": 3, "num_key_value_heads": None}},
        not_null=("use_sliding_window",),
        refused=[
            ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types must name"),
            ({**WINDOWS, "sliding_window": 0}, "sliding_window must be a positive whole number, not 0"),
            ({**WINDOWS, "max_window_layers": "all"}, "max_window_layers must be a whole number, not 'all'"),
            ({"attention_bias": False}, "attention_bias False is not supported; it must be on"),
        ],
        presets={"qwen2.5-7b": 7_615_616_512},
    ),
    "qwen3": Cases(
        variants={
            "qwen3": {"head_dim": 10, "num_key_value_heads": 6},
            "qwen3-yarn": {"head_dim": 8, "rope_parameters": {**YARN, "attention_factor": 0.8}},
            "qwen3-tied": {"head_dim": 8, "tie_word_embeddings": True},
            "qwen3-windows": {**WINDOWS, "layer_types": BOTH_KINDS},
        },
        run={"tie_word_embeddings": True},
        spellings={
            "qwen3-yarn": {"rope_scaling": LONG_YARN, "rope_theta": 1_000_000, "max_position_embeddings": 131072},
            "qwen3-windows": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        },
        not_null=("head_dim",),
        refused=[
            ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding window is on"),
            ({**WINDOWS, "layer_types": ["full_attention"]}, "layer_types must name .* for each of 2 layers"),
        ],
        presets={"qwen3-1.7b": 1_720_574_976, "qwen3-32b": 32_762_123_264},
    ),
    "qwen3_moe": Cases(
        variants={
            "qwen3-moe": {"head_dim": 10, **QWEN3_EXPERTS},
            "qwen3-moe-some-dense": {
                **QWEN3_EXPERTS,
                "norm_topk_prob": True,
                "num_hidden_layers": 4,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
                "tie_word_embeddings": True,
            },
        },
        required={"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        layers=QWEN3_EXPERTS,
        engine={"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": False},
        run={"tie_word_embeddings": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        not_null=("num_key_value_heads", "decoder_sparse_step", "norm_topk_prob"),
        experts=("num_experts", "num_local_experts"),
        apart=("gate_proj", "up_proj", "down_proj"),
        presets={"qwen3-235b-a22b": 235_093_634_560},
    ),
    **HYBRIDS,
    "glm4_moe": Cases(
        variants={
            "glm4-moe": {"head_dim": 8, **GLM_EXPERTS, "num_hidden_layers": 3, "use_qk_norm": True},
            "glm4-moe-groups": {
                **GLM_EXPERTS,
                "head_dim": 12,
                "n_routed_experts": 6,
                "n_group": 3,
                "topk_group": 2,
                "n_shared_experts": 2,
                "first_k_dense_replace": 0,
                "attention_bias": True,
                "norm_topk_prob": False,
                "tie_word_embeddings": True,
            },
            "glm4-moe-dense": {"head_dim": 8, **GLM_EXPERTS, "first_k_dense_replace": 2},
        },
        required={"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        layers={**GLM_EXPERTS, "head_dim": 8, "use_qk_norm": True},
        engine={
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "attention_bias": True,
            "use_qk_norm": True,
        },
        run={
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "routed_scaling_factor": 1.5,
        },
        spellings={
            "glm-quarter": {
                "partial_rotary_factor": 0.25,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
                "rope_theta": 500_000.0,
            },
            "glm-mtp": {"num_mtp_layers": 2},
            "glm-mtp-both": {"num_mtp_layers": 2, "num_nextn_predict_layers": 3},
            "glm-null": {"partial_rotary_factor": None},
            "glm-parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}},
        },
        not_null=("num_key_value_heads", "n_shared_experts", "n_group", "first_k_dense_replace", "norm_topk_prob"),
        refused=[
            ({"n_group": 4}, "n_group 4 must divide the 6 experts into groups of at least 2"),
            ({"n_group": 6}, "n_group 6 must divide the 6 experts into groups of at least 2"),
            ({"n_group": 2, "topk_group": 3}, "topk_group 3 is more than n_group 2"),
            ({"n_group": 3, "num_experts_per_tok": 3}, "1 of 3 groups of experts have fewer than"),
            ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a positive whole number or 0"),
            ({"routed_scaling_factor": 0}, "routed_scaling_factor must be a positive number"),
        ],
        experts=("n_routed_experts", "num_local_experts"),
        apart=("gate_proj", "up_proj", "down_proj"),
        presets={"glm-4.5-air": 106_852_251_264, "glm-4.6": 352_797_829_024},
    ),
    "minimax_m2": Cases(
        variants={
            "minimax-m2": {"head_dim": 8, **MINIMAX_EXPERTS, "rotary_dim": 4},
            "minimax-m2-whole": {"head_dim": 6, **MINIMAX_EXPERTS, "tie_word_embeddings": True},
        },
        required={"num_local_experts": 6, "num_experts_per_tok": 2},
        layers={**MINIMAX_EXPERTS, "head_dim": 8, "rotary_dim": 4},
        engine={"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 4},
        run={"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
        spellings={
            "minimax-rotary-dim": {"rotary_dim": 32, "rope_theta": 10_000_000},
            "minimax-both": {"rotary_dim": 32, "partial_rotary_factor": 0.75},
            "minimax-null": {"rotary_dim": 32, "partial_rotary_factor": None},
        },
        not_null=("num_key_value_heads", "head_dim", "rope_theta"),
        refused=[
            ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; 'sigmoid' is"),
            ({"shared_intermediate_size": 64}, "shared_intermediate_size 64 is not supported; 0 is"),
            ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not supported"),
            ({"rotary_dim": 129}, "partial_rotary_factor is at most 1"),
            ({"attn_type_list": [1, 0]}, "attn_type_list must be a list of 1"),
        ],
        experts=("num_local_experts", "num_experts"),
        apart=("w1", "w3", "w2"),
        presets={"minimax-m2": 228_689_764_864},
    ),
    "gpt_oss": Cases(
        variants={
            "gpt-oss": {"head_dim": 10, **GPT_OSS_EXPERTS},
            "gpt-oss-yarn": {
                "head_dim": 8,
                **GPT_OSS_EXPERTS,
                "rope_parameters": {**YARN, "truncate": False},
                "layer_types": [*reversed(BOTH_KINDS)],
                "swiglu_limit": 0.5,
                "swiglu_alpha": 1.1,
            },
        },
        required={"num_local_experts": 6, "num_experts_per_tok": 2},
        layers=GPT_OSS_EXPERTS,
        run={
            "attention_bias": True,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        spellings={
            "gpt-oss-theta": {"rope_theta": 10000, "rope_scaling": None},
            "gpt-oss-no-yarn": {"rope_parameters": {}},
        },
        not_null=("head_dim", "num_key_value_heads", "swiglu_limit", "attention_bias", "rope_theta"),
        experts=("num_local_experts", "num_experts"),
        presets={"gpt-oss-20b": 20_914_757_184},
    ),
}
VARIANTS: Mapping[str, Settings] = {
    name: {"model_type": kind, **settings}
    for kind, cases in FAMILIES.items()
    for name, settings in cases.variants.items()
}
