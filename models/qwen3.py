"""Qwen3, the dense models: Llama's block with a norm on every head's queries and keys."""

from collections.abc import Mapping
from typing import Any

from rptrain.models.hf_config import read_shape
from rptrain.models.llama import decoder
from rptrain.models.spec import ModelSpec

HEAD_SIZE = 128  # of every published size; config.json may leave it out


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json; UserError if it asks for what is not supported."""
    shape = read_shape(config, head_size=HEAD_SIZE, unsupported=_windows(config))
    return decoder("Qwen3ForCausalLM", config, shape, qk_norm=True)


def _windows(config: Mapping[str, Any]) -> list[str]:
    """Sliding windows in use: attention here sees the whole document."""
    kinds = config.get("layer_types")
    if kinds is not None:
        windowed = any(kind != "full_attention" for kind in kinds)
    else:
        first = config.get("max_window_layers", 28)
        in_use = config.get("use_sliding_window") and config.get("sliding_window", 4096)
        windowed = bool(in_use) and first < (config.get("num_hidden_layers") or 0)
    return ["layers with sliding-window attention are not supported"] if windowed else []
