"""Settings of hybrid decoders, the families with gated delta nets: Qwen3.5 and Qwen3-Next."""

from collections.abc import Mapping, Sequence
from typing import Any

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
EXPERTS_OF_HYBRIDS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 10,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}
REFUSED_HYBRIDS: Sequence[tuple[Mapping[str, Any], str]] = [
    (
        {"layer_types": ["sliding_attention", "full_attention"]},
        "layer_types must name linear_attention or full_attention for each of 2 layers",
    ),
    ({"layer_types": ["full_attention"]}, "layer_types must name linear_attention or full_attention for each of 2"),
    ({"full_attention_interval": 0}, "full_attention_interval must be a positive whole number, not 0"),
    ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16"),
    ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive whole number, not 0"),
    ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim must be a positive whole number, not '4'"),
    ({"attn_output_gate": False}, "attn_output_gate False is not supported; True is"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported; 'swish' is"),
    ({"attention_bias": True}, "attention_bias True is not supported; it must be off"),
    ({"head_dim": 6}, "partial_rotary_factor is at most 1, and times the head size 6 an even number, not 0.25"),
]
NOT_NULL_IN_HYBRIDS = ("head_dim", "num_key_value_heads", "linear_num_key_heads", "linear_conv_kernel_dim")
