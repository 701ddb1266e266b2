"""GPT-OSS: biases everywhere, attention sinks, windows in every other layer, experts; its shape, for plans."""

from collections.abc import Mapping
from typing import Any

from rptrain.models import decoder
from rptrain.models.hf_config import Sizes, read_experts, read_number, read_sizes, refuse
from rptrain.models.moe import moe_block
from rptrain.models.spec import ModelShape, Param, Part, Unit

ARCHITECTURE = "GptOssForCausalLM"
HEAD_SIZE = 64  # where config.json leaves it out; so is the window
WINDOW = 128
KINDS = ("sliding_attention", "full_attention")


def shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes; UserError that lists what would give wrong sizes or costs.

    Published checkpoints hold the experts in 4 bits; the shape is that of the 16-bit weights, which are trained.
    """
    found: list[str] = []
    sizes = read_sizes(config, found, HEAD_SIZE)
    experts, active = read_experts(config, "num_local_experts", found)
    windows = _windows(config, sizes.layers, found)
    if config.get("attention_bias") is False:
        found.append("attention_bias False is not supported; it must be on")
    refuse(found, "planned")

    units = [_unit(sizes, index, experts) for index in range(sizes.layers)]
    layers = [
        moe_block(sizes, index, intermediate=sizes.intermediate, experts=experts, active=active, window=window)
        for index, window in enumerate(windows)
    ]
    return decoder.model_shape(ARCHITECTURE, config, sizes, units, layers)


def _windows(config: Mapping[str, Any], layers: int, found: list[str]) -> list[int | None]:
    """The window of each layer's attention, None where it sees all."""
    window = read_number(config, "sliding_window", found, WINDOW)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [KINDS[index % 2] for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in KINDS for kind in kinds):
        found.append(f"layer_types must name {' or '.join(KINDS)} for each of {layers} layers")
        return []
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _unit(sizes: Sizes, index: int, experts: int) -> Unit:
    """The experts' tensors as they are stored: gate_up [E, D, 2I], down [E, I, D], and their biases."""
    at = f"model.layers.{index}"
    router, stored = f"{at}.mlp.router", f"{at}.mlp.experts"
    hidden, intermediate = sizes.hidden, sizes.intermediate

    def whole(name: str, key: str, shape: tuple[int, ...], std: float, decay: bool = False) -> Param:
        return Param(name, shape, (Part(key, shape[0]),), decay, std)

    params = (
        *decoder.attention_params(sizes, at, biases=True),
        whole("sinks", f"{at}.self_attn.sinks", (sizes.heads,), sizes.std),
        decoder.post_norm(sizes, at),
        decoder.matrix("router", hidden, sizes.std, (router, experts)),
        decoder.bias("router_bias", (router, experts)),
        whole("experts_gate_up", f"{stored}.gate_up_proj", (experts, hidden, 2 * intermediate), sizes.std, True),
        whole("experts_gate_up_bias", f"{stored}.gate_up_proj_bias", (experts, 2 * intermediate), 0.0),
        whole("experts_down", f"{stored}.down_proj", (experts, intermediate, hidden), sizes.std, True),
        whole("experts_down_bias", f"{stored}.down_proj_bias", (experts, hidden), 0.0),
    )
    return Unit(f"layers.{index}", params)
