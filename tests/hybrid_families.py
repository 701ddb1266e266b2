"""The cases of the families with delta nets, by model_type."""

from collections.abc import Mapping, Sequence

from tests.family_cases import BOTH_KINDS, LONG_YARN, QWEN3_EXPERTS, Cases, Settings

DELTA_NETS = {
    "initializer_range": 0.1,  # larger weights multiply rounding errors
    "head_dim": 8,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
ODD_DELTA_NETS = {  # of one value head per key head, and a convolution of 3
    "initializer_range": 0.1,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": True,
}
SHARED_EXPERT = {**QWEN3_EXPERTS, "shared_expert_intermediate_size": 9}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}
REFUSED_HYBRIDS: Sequence[tuple[Settings, str]] = [
    ({"layer_types": BOTH_KINDS}, "layer_types must name linear_attention or full_attention for each of 2 layers"),
    ({"layer_types": ["full_attention"]}, "layer_types must name linear_attention or full_attention for each of 2"),
    ({"full_attention_interval": 0}, "full_attention_interval must be a positive whole number, not 0"),
    ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16"),
    ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive whole number, not 0"),
    ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim must be a positive whole number, not '4'"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is at least 2, not 1"),
    ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim is at most 8, not 9"),
    ({"linear_key_head_dim": 129}, "linear_key_head_dim is at most 128, not 129"),
    ({"attn_output_gate": False}, "attn_output_gate False is not supported; True is"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported; 'swish' is"),
    ({"attention_bias": True}, "attention_bias True is not supported; it must be off"),
    ({"head_dim": 6}, "partial_rotary_factor is at most 1, and times the head size 6 an even number, not 0.25"),
]
NOT_NULL_IN_HYBRIDS = ("head_dim", "num_key_value_heads", "linear_num_key_heads", "linear_conv_kernel_dim")

HYBRIDS: Mapping[str, Cases] = {
    "qwen3_5_text": Cases(
        variants={
            "qwen3.5": {**DELTA_NETS, "num_hidden_layers": 3, "layer_types": None, "linear_conv_kernel_dim": 2},
            "qwen3.5-odd": ODD_DELTA_NETS,
        },
        layers=DELTA_NETS,
        engine=DELTA_NETS,
        run={**DELTA_NETS, "tie_word_embeddings": True},
        spellings={
            "qwen3.5-mrope": {"rope_parameters": MROPE, "head_dim": 256, "mamba_ssm_dtype": "float32"},
            "qwen3.5-whole": {"partial_rotary_factor": None, "full_attention_interval": 3},
            "qwen3.5-yarn": {"rope_scaling": LONG_YARN, "rope_theta": 1e7, "linear_num_value_heads": 48},
            "qwen3.5-kinds": {"layer_types": ["full_attention", *["linear_attention"] * 3], "mlp_only_layers": []},
        },
        not_null=(*NOT_NULL_IN_HYBRIDS, "full_attention_interval"),
        refused=REFUSED_HYBRIDS,
        presets={"qwen3.5-4b": 4_205_751_296, "qwen3.5-9b": 8_953_803_264, "qwen3.5-27b": 26_895_998_464},
        slow=True,
    ),
    "qwen3_5_moe_text": Cases(
        variants={
            "qwen3.5-moe": {**ODD_DELTA_NETS, **SHARED_EXPERT},
        },
        required={
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 10,
        },
        layers={**DELTA_NETS, **SHARED_EXPERT},
        engine={**DELTA_NETS, **SHARED_EXPERT},
        run={**DELTA_NETS, **SHARED_EXPERT, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8},
        spellings={"qwen3.5-moe-mrope": {"rope_parameters": MROPE, "head_dim": 256, "intermediate_size": 3}},
        not_null=NOT_NULL_IN_HYBRIDS,
        refused=[
            *REFUSED_HYBRIDS,
            ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a positive whole number"),
            ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\] is not supported; \[\] is"),
            ({"norm_topk_prob": False}, "norm_topk_prob False is not supported; True is"),
            ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported; 1 is"),
        ],
        experts=("num_experts",),
        apart=("gate_proj", "up_proj", "down_proj"),
        presets={"qwen3.5-35b-a3b": 34_660_610_688, "qwen3.5-122b-a10b": 122_111_526_912},
        slow=True,
    ),
    "qwen3_next": Cases(
        variants={
            "qwen3-next": {**DELTA_NETS, **SHARED_EXPERT},
            "qwen3-next-some-dense": {
                **ODD_DELTA_NETS,
                **SHARED_EXPERT,
                "num_hidden_layers": 4,
                "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
                "norm_topk_prob": False,
            },
        },
        required={
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 10,
        },
        layers={**DELTA_NETS, **SHARED_EXPERT},
        engine={**DELTA_NETS, **SHARED_EXPERT, "decoder_sparse_step": 2, "norm_topk_prob": False},
        run={**DELTA_NETS, **SHARED_EXPERT, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8},
        spellings={"qwen3-next-theta": {"rope_theta": 10_000_000, "rope_scaling": None, "partial_rotary_factor": 0.5}},
        not_null=(*NOT_NULL_IN_HYBRIDS, "norm_topk_prob", "decoder_sparse_step"),
        refused=REFUSED_HYBRIDS,
        experts=("num_experts",),
        apart=("gate_proj", "up_proj", "down_proj"),
        presets={"qwen3-next-80b-a3b": 79_674_391_296},
        slow=True,
    ),
}
