"""Rotary position embeddings: frequencies from a config, and their tables."""

import math
from collections.abc import Mapping, Sequence
from reprlib import repr as shortened
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.batch import Rotation
from rptrain.models.layer import QueryScaling, Rotary

YARN = ("factor", "original_max_position_embeddings")
YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
LARGEST = torch.finfo(torch.float32).max  # the largest number in a config
QUERY_SCALING = "llama_4_scaling_beta"
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class RotaryTables:
    """A model's rotary positions on a device, in float32 (float64 for float64 models)."""

    def __init__(self, rotaries: Sequence[Rotary], dtype: torch.dtype, device: torch.device) -> None:
        self._rotaries = [(torch.tensor(each.inv_freq, dtype=dtype).to(device), each) for each in rotaries]

    def at(self, positions: Tensor) -> tuple[Rotation, ...]:
        """The tables [T, R/2] and factors [T] of positions [T]."""
        return tuple(
            tables(inv_freq, positions, rotary.factor, rotary.query_scaling) for inv_freq, rotary in self._rotaries
        )


def tables(
    inv_freq_R: Tensor, positions: Tensor, factor: float = 1.0, query_scaling: QueryScaling | None = None
) -> Rotation:
    """cos and sin [T, R/2] of positions [T] in the frequencies' dtype, multiplied by `factor`, and queries' factors."""
    positions = positions.to(inv_freq_R.dtype)
    angles = positions.unsqueeze(1) * inv_freq_R
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    if query_scaling is None:
        return Rotation(cos, sin)
    contexts = (positions / query_scaling.original_max_position_embeddings).floor_()
    return Rotation(cos, sin, contexts.log1p_().mul_(query_scaling.beta).add_(1))


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings as one mapping.

    Older files have `rope_theta` and `rope_scaling` (with `type` or `rope_type`), newer ones `rope_parameters`; with
    both, `rope_scaling` wins, as in transformers. Empty if the value is not a mapping.
    """
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stored, Mapping):
        return {}
    rope = dict(stored)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor") is None:
        given = config.get("partial_rotary_factor")
        rope["partial_rotary_factor"] = 1.0 if given is None else given
    if rope["rope_type"] in ("llama3", "yarn"):
        original = "original_max_position_embeddings"
        longest = config.get("max_position_embeddings")
        lengths = (config.get(original), rope.get(original), longest)
        rope[original] = next((length for length in lengths if length is not None), None)
        if rope["rope_type"] == "yarn" and rope.get("factor") is None and _is_positive(rope[original]):
            rope["factor"] = longest / rope[original] if _is_positive(longest) else None
    return rope


def problems(
    rope: Mapping[str, Any], head_size: int, *, partial: bool = False, query_scaling: bool = False
) -> list[str]:
    """The rotary settings that are not supported. `partial`: rotating a part of a head's columns is. `query_scaling`:
    scaling queries by their positions is.
    """
    if not rope:
        return ["rope_scaling or rope_parameters must be a JSON object"]
    if any(isinstance(value, Mapping) for value in rope.values()):
        return ["rope_parameters differ by layer type; one set for all layers is supported"]
    found = []
    needed = {"default": (), "llama3": LLAMA3, "yarn": YARN}.get(str(rope["rope_type"]))
    if needed is None:
        found.append(f"rope type {rope['rope_type']!r} is not supported; default, llama3 and yarn are")
    factor = rope["partial_rotary_factor"]
    if factor != 1 and not partial:
        found.append(f"partial_rotary_factor {factor} is not supported; 1 is")
    elif factor != 1 and (
        not _is_positive(factor) or factor > 1 or columns(rope, head_size) not in range(2, 1 << 30, 2)
    ):
        found.append(
            f"partial_rotary_factor is at most 1, and times the head size {head_size} an even number, not {factor!r}"
        )
    for key in ("rope_theta", *(needed or ())):
        if not _is_positive(rope.get(key)):
            found.append(f"{key} of the rotary embedding must be a positive number, not {shortened(rope.get(key))}")
    if rope["rope_type"] == "yarn":
        for key in YARN_OPTIONS:
            off = rope.get(key) == 0 and key in ("mscale", "mscale_all_dim")  # as transformers reads it
            if rope.get(key) is not None and not off and not _is_positive(rope[key]):
                found.append(
                    f"{key} of the rotary embedding must be a positive number or null, not {shortened(rope[key])}"
                )
        if not isinstance(rope.get("truncate", True), bool):
            found.append(f"truncate of the rotary embedding must be true or false, not {rope['truncate']!r}")
        if not found and rope["rope_theta"] <= 1:
            found.append(f"rope_theta must be above 1 with rope type 'yarn', not {rope['rope_theta']!r}")
    if rope.get(QUERY_SCALING):
        found += _query_scaling_problems(rope, allowed=query_scaling)
    if rope["rope_type"] == "llama3" and not found and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        found.append("low_freq_factor of the rotary embedding must be below high_freq_factor")
    return found


def _query_scaling_problems(rope: Mapping[str, Any], *, allowed: bool) -> list[str]:
    if not allowed:
        return [f"{QUERY_SCALING} of the rotary embedding is not supported in this architecture"]
    keys = (QUERY_SCALING, "original_max_position_embeddings")
    return [
        f"{key} of the rotary embedding must be a positive number, not {shortened(rope.get(key))}"
        for key in keys
        if not _is_positive(rope.get(key))
    ]


def columns(rope: Mapping[str, Any], head_size: int) -> int:
    """The columns of a head that are rotated."""
    return int(head_size * rope["partial_rotary_factor"])


def rotary(rope: Mapping[str, Any], head_size: int) -> Rotary:
    """The rotary positions of these settings."""
    beta = rope.get(QUERY_SCALING)
    query_scaling = None if not beta else QueryScaling(float(beta), float(rope["original_max_position_embeddings"]))
    return Rotary(inverse_frequencies(rope, columns(rope, head_size)), attention_factor(rope), query_scaling)


def inverse_frequencies(rope: Mapping[str, Any], head_size: int) -> tuple[float, ...]:
    """theta ** (-2i / C) for i < C/2, computed in float32 as the models were trained with.

    With llama3 scaling, wavelengths above original / low_freq_factor are stretched by `factor`, those below
    original / high_freq_factor are left, and the ones between are blended (Llama 3.1). YaRN blends by the index of
    the frequency (arXiv 2309.00071, 3.2).
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    spacing = float(rope["rope_theta"]) ** exponents
    frequencies = 1.0 / spacing
    if rope["rope_type"] == "yarn":
        kept = _kept(rope, head_size)
        frequencies = 1.0 / (rope["factor"] * spacing) * (1 - kept) + frequencies * kept
    if rope["rope_type"] == "llama3":
        factor, low, high, original = (rope[key] for key in LLAMA3)
        wavelengths = 2 * math.pi / frequencies
        blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        blended = (1 - blend) * frequencies / factor + blend * frequencies
        frequencies = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return tuple(frequencies.tolist())


def attention_factor(rope: Mapping[str, Any]) -> float:
    """The factor of cos and sin: 1, or with YaRN the value in the settings or 0.1 ln(factor) + 1."""
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    logarithm = 0.1 * math.log(max(rope["factor"], 1))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return (logarithm * rope["mscale"] + 1) / (logarithm * rope["mscale_all_dim"] + 1)
    return logarithm + 1


def _kept(rope: Mapping[str, Any], head_size: int) -> Tensor:
    """The fraction, from 1 to 0, of each of C/2 frequencies that YaRN keeps; the rest is stretched by `factor`.

    It is 1 for frequencies with at least beta_fast turns in the original context, and 0 below beta_slow turns.
    """

    def index(turns: float) -> float:
        ratio = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return head_size * math.log(ratio) / (2 * math.log(rope["rope_theta"]))

    low, high = index(rope.get("beta_fast") or 32), index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low or 0.001  # as transformers has it
    return 1 - ((torch.arange(head_size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST
