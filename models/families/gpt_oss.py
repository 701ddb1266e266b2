"""GPT-OSS: biases everywhere, attention sinks, windows in every other layer, experts."""

from collections.abc import Mapping
from typing import Any

from rptrain.kernels.moe import Scoring
from rptrain.kernels.swiglu import Clamp
from rptrain.models.families import decoder
from rptrain.models.families.config import Sizes, read_experts, read_number, read_shape, read_windows, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.layers.attention import Attention
from rptrain.models.layers.moe import MoE
from rptrain.models.layers.router import Router
from rptrain.models.params import CheckpointPart, Param, Unit
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "GptOssForCausalLM"
ALIASES = (("num_experts", "num_local_experts"),)
DEFAULTS = {  # defaults for missing keys of config.json
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features.

    Published checkpoints hold the experts in 4 bits (MXFP4); they are dequantized when they are loaded.
    """
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, ("sliding_window",), ALIASES)
    experts, active = read_experts(filled, "num_local_experts", found)
    windows = _windows(filled, found)
    alpha, limit = (read_number(filled, key, found, kind=float) for key in ("swiglu_alpha", "swiglu_limit"))
    shape = read_shape(filled, unsupported=found, biases=True, quantized="mxfp4")

    router = Router(experts=experts, active=active, scoring=Scoring(over_chosen=True), bias=True)
    mixture = MoE.of(shape.hidden, shape.intermediate, router, bias=True, clamp=Clamp(alpha, limit))
    form = {"qkv_bias": True, "o_bias": True, "sinks": True}
    mixers = [decoder.attention(shape, **form, window=window) for window in windows]
    layers = [decoder.block(shape, index, mixer, mixture) for index, mixer in enumerate(mixers)]
    units = [_unit(shape, index, mixer, experts) for index, mixer in enumerate(mixers)]
    return decoder.model(ARCHITECTURE, config, shape, units, layers)


def _windows(config: Mapping[str, Any], found: list[str]) -> list[int | None]:
    """The window of each layer's attention: every other layer has one, unless config.json lists the layers."""
    layers = read_number(config, "num_hidden_layers", [])  # `read_shape` reports the problem
    window = read_number(config, "sliding_window", found)
    return read_windows(config, window, [index % 2 == 0 for index in range(layers)], found)


def _unit(sizes: Sizes, index: int, attention: Attention, experts: int) -> Unit:
    """The experts' tensors as they are stored: gate_up [E, D, 2I], down [E, I, D], and their biases."""
    at = f"model.layers.{index}"
    router, stored = f"{at}.mlp.router", f"{at}.mlp.experts"
    hidden, intermediate = sizes.hidden, sizes.intermediate

    def whole(name: str, key: str, shape: tuple[int, ...], std: float) -> Param:
        """The matrices of experts decay, and published checkpoints hold them in 4 bits."""
        matrices = len(shape) == 3
        return Param(name, shape, (CheckpointPart(key, shape[0], mxfp4=matrices),), matrices, std)

    params = (
        *decoder.attention_params(sizes, at, attention),
        whole("sinks", f"{at}.self_attn.sinks", (sizes.heads,), sizes.std),
        decoder.post_norm(sizes, at),
        decoder.matrix("router", hidden, sizes.std, (router, experts)),
        decoder.bias("router_bias", (router, experts)),
        whole("experts_gate_up", f"{stored}.gate_up_proj", (experts, hidden, 2 * intermediate), sizes.std),
        whole("experts_gate_up_bias", f"{stored}.gate_up_proj_bias", (experts, 2 * intermediate), 0.0),
        whole("experts_down", f"{stored}.down_proj", (experts, intermediate, hidden), sizes.std),
        whole("experts_down_bias", f"{stored}.down_proj_bias", (experts, hidden), 0.0),
    )
    return Unit(f"layers.{index}", params)


FAMILY = Family(ARCHITECTURE, "gpt_oss", build, has_experts=True)
