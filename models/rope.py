"""Rotary position embeddings: frequencies from a config, and their tables."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def tables(inv_freq_C: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, C/2] of positions [T], in the frequencies' type: float32, or float64 for float64 models."""
    angles = positions.to(inv_freq_C.dtype).unsqueeze(1) * inv_freq_C
    return angles.cos(), angles.sin()


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings as one mapping, however the config spells them.

    Older files have `rope_theta` and `rope_scaling` (with `type` or `rope_type`), newer ones
    `rope_parameters`; `rope_scaling` wins where there are both, as in transformers.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        if rope.get(key) is None:
            rope[key] = default if config.get(key) is None else config[key]
    if rope["rope_type"] == "llama3":
        original = "original_max_position_embeddings"
        rope[original] = config.get(original) or rope.get(original) or config.get("max_position_embeddings")
    return rope


def problems(rope: Mapping[str, Any]) -> list[str]:
    """What in the rotary settings we would compute wrongly or not at all."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return ["rope_parameters differ by layer type; one set for all layers is supported"]
    found = []
    if rope["rope_type"] not in ("default", "llama3"):
        found.append(f"rope type {rope['rope_type']!r} is not supported; default and llama3 are")
    if rope["partial_rotary_factor"] != 1:
        found.append(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported; 1 is")
    needed = ("rope_theta", *LLAMA3) if rope["rope_type"] == "llama3" else ("rope_theta",)
    for key in needed:
        value = rope.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            found.append(f"{key} of the rotary embedding must be a positive number, not {value!r}")
    return found


def inverse_frequencies(rope: Mapping[str, Any], head_size: int) -> tuple[float, ...]:
    """theta ** (-2i / C) for i < C/2, computed in float32 as the models were trained with.

    With llama3 scaling, wavelengths above original / low_freq_factor are stretched by `factor`, those below
    original / high_freq_factor are left, and the ones between are blended (Llama 3.1).
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    if rope["rope_type"] == "llama3":
        factor, low, high, original = (rope[key] for key in LLAMA3)
        wavelengths = 2 * math.pi / frequencies
        blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        blended = (1 - blend) * frequencies / factor + blend * frequencies
        frequencies = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return tuple(frequencies.tolist())
