"""Formats of AdamW's moments, exact, 16-bit or 8-bit, and stochastic rounding to them.

A step changes exp_avg_sq mostly by its decay, a fraction 1 - beta2 of it. This is less than half a unit in the last
place of both small formats, so rounding to nearest would never change it (the "signal swamping" of arXiv 2505.00347).
Stochastic rounding keeps the expected value, so sums over steps are right. The random numbers depend only on the seed,
step, unit and element. The update itself uses the moments before rounding.

`bf16`: both moments in bfloat16, whose exponent is that of float32.

`int8`: codes in blocks of 128 elements with a float32 scale for each moment (block-wise, as in arXiv 2110.02861). With
code c and scale s, exp_avg is c * |c| * s, and the root of exp_avg_sq is c * c * s. The largest value of a
block is exact. Steps grow finer toward zero, as in that paper, but without a table. The codes of exp_avg_sq span a
factor of 4e9 in a block. Smaller values are stored as the smallest code, never as zero, because the update divides by
the root (arXiv 2309.01507).
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rptrain.models.params import ALIGNMENT

Moments = Literal["fp32", "bf16", "int8"]
BLOCK = ALIGNMENT  # elements, as in moments.h; a block never has elements of two parameters
CHUNK = 65536  # elements that a thread of the optimizer takes at once, as in adam.c
MEAN_TOP, ROOT_TOP, LEAST = (np.float32(x) for x in (127**2, 255**2, 1e-20))  # as in moments.h
LARGEST = 1e38

Array = np.ndarray


def layout(moments: Moments, wide: torch.dtype) -> tuple[tuple[str, torch.dtype, int], ...]:
    """The buffers of a unit: name, dtype, and the number of the unit's elements per entry. `fp32` means `wide`."""
    if moments == "int8":
        codes = (("exp_avg", torch.int8, 1), ("exp_avg_sq", torch.uint8, 1))
        return (*codes, *((f"{name}_scale", torch.float32, BLOCK) for name, _, _ in codes))
    kind = torch.bfloat16 if moments == "bf16" else wide
    return ("exp_avg", kind, 1), ("exp_avg_sq", kind, 1)


def kind_of(exp_avg: torch.dtype) -> Moments:
    """The format whose exp_avg has this dtype."""
    small: dict[torch.dtype, Moments] = {torch.bfloat16: "bf16", torch.int8: "int8"}
    return small.get(exp_avg, "fp32")


def bytes_each(moments: Moments, wide: torch.dtype) -> float:
    """Bytes that the moments take per parameter."""
    return sum(dtype.itemsize / shared for _, dtype, shared in layout(moments, wide))


def noise(seed: int, step: int, unit: int) -> int:
    """The random seed of a unit's first element in a step; 32 bits."""
    return int(np.random.SeedSequence((seed, step, unit)).generate_state(1)[0])


def read(buffers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Decodes both moments from buffers of a small format to float32."""
    if "exp_avg_scale" not in buffers:
        return buffers["exp_avg"].float(), buffers["exp_avg_sq"].float()
    codes, roots = (_blocks(buffers[name]).astype(np.float32) for name in ("exp_avg", "exp_avg_sq"))
    mean = codes * np.abs(codes) * _scales(buffers, "exp_avg")
    root = roots * roots * _scales(buffers, "exp_avg_sq")
    return _flat(mean), _flat(root * root)


def write(buffers: Mapping[str, Tensor], exp_avg: Tensor, exp_avg_sq: Tensor, noise: int) -> None:
    """Rounds both moments into buffers of a small format; element i uses the random number of noise + i.

    Codes need finite numbers: a larger exp_avg_sq is clamped, in the caller's tensor too.
    """
    random = _random(noise, len(exp_avg))
    if "exp_avg_scale" not in buffers:
        for name, value, bits in (("exp_avg", exp_avg, random & 0xFFFF), ("exp_avg_sq", exp_avg_sq, random >> 16)):
            rounded = (value.numpy().view(np.uint32) + bits) >> 16
            buffers[name].view(torch.int16).numpy()[:] = rounded.astype(np.uint16).view(np.int16)
        return
    random = random.reshape(-1, BLOCK)
    exp_avg_sq.clamp_(max=LARGEST)
    mean, root = exp_avg.numpy().reshape(-1, BLOCK), np.sqrt(exp_avg_sq.numpy()).reshape(-1, BLOCK)
    mean_top, root_top = (np.maximum(np.abs(x).max(1, keepdims=True), LEAST) for x in (mean, root))
    _scales(buffers, "exp_avg")[:] = mean_top / MEAN_TOP
    _scales(buffers, "exp_avg_sq")[:] = root_top / ROOT_TOP
    _blocks(buffers["exp_avg"])[:] = _mean_codes(mean * (MEAN_TOP / mean_top), random & 0xFFFF)
    _blocks(buffers["exp_avg_sq"])[:] = _root_codes(root * (ROOT_TOP / root_top), random >> 16)


def _random(noise: int, count: int) -> Array:
    """32 random bits for each element: the finalizer of MurmurHash3 (Appleby) applied to a counter."""
    x = np.arange(noise, noise + count, dtype=np.uint64).astype(np.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _share(bits: Array) -> Array:
    """16 bits as a number strictly between 0 and 1."""
    return (bits.astype(np.float32) + np.float32(0.5)) * np.float32(1 / 65536)


def _mean_codes(value: Array, bits: Array) -> Array:
    size = np.abs(value)
    low = np.minimum(np.floor(np.sqrt(size)), np.float32(126))
    code = low + (_share(bits) * (2 * low + 1) < size - low * low)
    return np.where(value < 0, -code, code).astype(np.int8)


def _root_codes(root: Array, bits: Array) -> Array:
    code = np.clip(np.floor(np.sqrt(root)), np.float32(1), np.float32(254))
    low, high = code * code, (code + 1) * (code + 1)
    code = code + (_share(bits) * (high * high - low * low) < root * root - low * low)
    return np.where(root > 0, code, 0).astype(np.uint8)


def _blocks(codes: Tensor) -> Array:
    return codes.numpy().reshape(-1, BLOCK)


def _scales(buffers: Mapping[str, Tensor], name: str) -> Array:
    return buffers[f"{name}_scale"].numpy()[:, None]


def _flat(blocks: Array) -> Tensor:
    return torch.from_numpy(blocks.reshape(-1))
