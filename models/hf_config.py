"""A decoder's shape out of a Hugging Face config.json; what we would compute wrongly is an error."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from rptrain.errors import UserError
from rptrain.models import rope

MOST = {"num_hidden_layers": 10_000, "head_dim": 65_536}  # more is a slip, and would take all memory before it shows


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like decoder."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    std: float
    tied: bool
    inv_freq: tuple[float, ...]


def read_shape(config: Mapping[str, Any], head_size: int | None = None, unsupported: list[str] | None = None) -> Shape:
    """The shape, or a UserError that lists every problem.

    `head_size` is the architecture's own default where head_dim is missing (else hidden / heads);
    `unsupported` are problems that the caller found.
    """
    found = list(unsupported or [])
    sizes = {
        key: _number(config.get(key), key, found)
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        )
    }  # fmt: skip
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kv_heads = _number(_get(config, "num_key_value_heads", heads), "num_key_value_heads", found)
    if heads % kv_heads:
        found.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and head_size is None and hidden % heads:
        found.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    size = _number(_get(config, "head_dim", head_size or max(hidden // heads, 1)), "head_dim", found)
    if size % 2:
        found.append(f"head_dim must be even for rotary positions, not {size}")
    eps = _number(_get(config, "rms_norm_eps", 1e-6), "rms_norm_eps", found, float)
    std = _number(_get(config, "initializer_range", 0.02), "initializer_range", found, float)

    if (activation := _get(config, "hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"hidden_act {activation!r} is not supported; silu is")
    for key in ("attention_bias", "mlp_bias", "attention_dropout"):
        if config.get(key):
            found.append(f"{key} {config[key]!r} is not supported; it must be off")
    if config.get("quantization_config"):
        found.append("quantization_config: the weights are quantised; use the 16-bit or 32-bit original")
    settings = rope.parameters(config)
    found += rope.problems(settings)
    if found:
        raise UserError("config.json describes a model that cannot be trained here:\n- " + "\n- ".join(found))
    return Shape(
        vocab=sizes["vocab_size"],
        hidden=hidden,
        intermediate=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        eps=eps,
        std=std,
        tied=bool(config.get("tie_word_embeddings", False)),
        inv_freq=rope.inverse_frequencies(settings, size),
    )


def _get(config: Mapping[str, Any], key: str, default: Any) -> Any:
    return default if config.get(key) is None else config[key]


def _number(value: Any, key: str, found: list[str], kind: type = int) -> Any:
    """`value`, or one that will do with a problem noted, so that reading goes on."""
    accepted = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if accepted and 0 < value <= MOST.get(key, inf):
        return kind(value)
    if accepted and value > 0:
        found.append(f"{key} is at most {MOST[key]}, not {value}")
        return MOST[key]
    what = "a positive whole number" if kind is int else "a positive number"
    found.append(f"{key} is missing" if value is None else f"{key} must be {what}, not {value!r}")
    return 1
