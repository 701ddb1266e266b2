"""Qwen3-MoE: Qwen3's attention with a mixture of experts; its shape, for plans."""

from collections.abc import Mapping
from typing import Any

from rptrain.models import decoder
from rptrain.models.hf_config import Sizes, read_experts, read_number, read_sizes, refuse
from rptrain.models.moe import moe_block
from rptrain.models.spec import ModelShape, Unit

ARCHITECTURE = "Qwen3MoeForCausalLM"


def shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes; UserError that lists what would give wrong sizes or costs.

    Layers without experts (`mlp_only_layers`, `decoder_sparse_step`) are Qwen3's.
    """
    found: list[str] = []
    sizes = read_sizes(config, found)
    key = "num_local_experts" if config.get("num_experts") is None and "num_local_experts" in config else "num_experts"
    experts, active = read_experts(config, key, found)
    intermediate = read_number(config, "moe_intermediate_size", found)
    sparse = _sparse_layers(config, sizes.layers, found)
    if config.get("attention_bias"):
        found.append(f"attention_bias {config['attention_bias']!r} is not supported; it must be off")
    if config.get("use_sliding_window") and config.get("sliding_window", 4096):
        found.append("layers with sliding-window attention are not supported")
    refuse(found, "planned")

    units, layers = [], []
    for index, with_experts in enumerate(sparse):
        if with_experts:
            units.append(_unit(sizes, index, intermediate, experts))
            layers.append(
                moe_block(sizes, index, intermediate=intermediate, experts=experts, active=active, qk_norm=True)
            )
        else:
            units.append(decoder.dense_unit(sizes, index, qk_norm=True))
            layers.append(decoder.dense_block(sizes, index, qk_norm=True))
    return decoder.model_shape(ARCHITECTURE, config, sizes, units, layers)


def _sparse_layers(config: Mapping[str, Any], layers: int, found: list[str]) -> list[bool]:
    """Whether each layer has experts."""
    step = read_number(config, "decoder_sparse_step", found, 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        found.append(f"mlp_only_layers must be a list of layers' numbers, not {dense!r}")
        dense = []
    return [index not in dense and (index + 1) % step == 0 for index in range(layers)]


def _unit(sizes: Sizes, index: int, intermediate: int, experts: int) -> Unit:
    """Expert by expert, gate before up: experts_gate_up [2IE, D], experts_down [DE, I]."""
    at = f"model.layers.{index}"
    names = [f"{at}.mlp.experts.{expert}" for expert in range(experts)]
    gate_up = [(f"{name}.{kind}_proj", intermediate) for name in names for kind in ("gate", "up")]
    down = [(f"{name}.down_proj", sizes.hidden) for name in names]
    params = (
        *decoder.attention_params(sizes, at, qk_norm=True),
        decoder.post_norm(sizes, at),
        decoder.matrix("router", sizes.hidden, sizes.std, (f"{at}.mlp.gate", experts)),
        decoder.matrix("experts_gate_up", sizes.hidden, sizes.std, *gate_up),
        decoder.matrix("experts_down", intermediate, sizes.std, *down),
    )
    return Unit(f"layers.{index}", params)
