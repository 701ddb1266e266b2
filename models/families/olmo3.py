"""OLMo 3: post-norms after attention and MLP, norms over all queries and all keys of a token, windows in most layers.

Layers with a window and layers without one may have rotary positions of their own.
"""

from collections.abc import Mapping
from typing import Any

from rptrain.models.families.config import KINDS, read_flag, read_number, read_shape, read_windows, with_defaults
from rptrain.models.families.family import Family
from rptrain.models.families.llama import decoder
from rptrain.models.layers import rope
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "Olmo3ForCausalLM"
DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "pad_token_id": 1}  # for missing keys of config.json
THETA = 500_000.0


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    filled = with_defaults(config, DEFAULTS, found, ("sliding_window", "pad_token_id"))
    layers = read_number(filled, "num_hidden_layers", [])  # `read_shape` reports the problem
    window = read_number(filled, "sliding_window", found)
    windows = read_windows(filled, window, [(index + 1) % 4 != 0 for index in range(layers)], found)
    biases = read_flag(filled, "attention_bias", found)
    found += _malformed_ropes(filled)
    ropes = [_rope(filled, kind) for kind in KINDS]
    if any(settings.get("truncate") is False for settings in ropes):  # transformers does not read it here
        found.append("truncate false of the rotary embedding is not supported in this architecture")
    shape = read_shape(filled, unsupported=found, biases=biases, ropes=ropes)
    return decoder(
        ARCHITECTURE,
        config,
        shape,
        windows,
        [KINDS.index("full_attention" if window is None else "sliding_attention") for window in windows],
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        whole_qk_norm=True,
        qkv_bias=biases,
        o_bias=biases,
    )


def _malformed_ropes(config: Mapping[str, Any]) -> list[str]:
    """The rotary settings that are not JSON objects, or not one for each kind of layers."""
    scaling, by_kind = config.get("rope_scaling"), config.get("rope_parameters")
    found = []
    if scaling is not None and not isinstance(scaling, Mapping):
        found.append(f"rope_scaling must be a JSON object, not {scaling!r}")
    if by_kind is not None and not (
        isinstance(by_kind, Mapping)
        and all(isinstance(by_kind.get(kind), Mapping | None) for kind in KINDS)
        and by_kind.get("rope_type", "default") == "default"  # beside the kinds, where transformers ignores it
    ):
        found.append(f"rope_parameters must be a JSON object with an object each for {' and '.join(KINDS)}")
    return found


def _rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The rotary settings of a kind of layers; `rope_scaling` and `rope_theta` are those of full attention alone."""
    by_kind = config.get("rope_parameters")
    stored = by_kind.get(kind) if isinstance(by_kind, Mapping) else None
    settings: dict[str, Any] = dict(stored) if isinstance(stored, Mapping) else {"rope_type": "default"}
    if kind == "full_attention":
        scaling = config.get("rope_scaling")
        settings |= scaling if isinstance(scaling, Mapping) else {}
        settings.setdefault("rope_theta", config.get("rope_theta", THETA))
    settings.setdefault("rope_theta", THETA)
    ignored = ("rope_scaling", "original_max_position_embeddings")
    return rope.parameters({**config, **dict.fromkeys(ignored), "rope_parameters": settings})


FAMILY = Family(ARCHITECTURE, "olmo3", build)
