"""Weights in 4 and 8 bits: NF4, MXFP4 and int8, quantised in PyTorch and widened by Triton.

A block of consecutive elements of the flattened tensor shares a scale; the last block may be shorter. Widening never
waits for the device; quantising, once when a model is loaded, does.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels import reference_quant as reference
from rptrain.kernels.launch import fused, tl, triton

CHUNK = 2**22  # elements that are quantised at a time: bounds the temporary memory
ELEMENTS = 2048  # of a program


@dataclass(frozen=True)
class Format:
    """How weights are stored. `encode` takes float32 [blocks, block] and gives codes, one each, and scales [blocks];
    `decode` is its inverse on packed codes, in float32."""

    name: str
    block: int  # elements that share a scale
    bits: int
    high_first: bool  # of two 4-bit codes in a byte, whether the earlier lies in the high half
    scale_dtype: torch.dtype
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]

    def code_bytes(self, numel: int) -> int:
        return math.ceil(numel * self.bits / 8)

    def scale_count(self, numel: int) -> int:
        return math.ceil(numel / self.block)

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.uint8 if self.bits == 4 else torch.int8


def quantize(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Codes [code_bytes] and scales [scale_count] of finite weights of any shape; the same bits on every device.

    A block of zeros stays zero.
    """
    flat = w.reshape(-1)
    codes = torch.empty(fmt.code_bytes(flat.numel()), dtype=fmt.code_dtype, device=w.device)
    scales = torch.empty(fmt.scale_count(flat.numel()), dtype=fmt.scale_dtype, device=w.device)
    for begin in range(0, flat.numel(), CHUNK):
        part = flat[begin : begin + CHUNK].float()
        blocks = F.pad(part, (0, -part.numel() % fmt.block)).view(-1, fmt.block)
        each, scale = fmt.encode(blocks)
        if fmt.bits == 4:
            first, second = each[:, 0::2], each[:, 1::2]
            each = (first << 4 | second) if fmt.high_first else (second << 4 | first)
        size = fmt.code_bytes(part.numel())
        start = fmt.code_bytes(begin)
        codes[start : start + size] = each.reshape(-1)[:size]
        scales[begin // fmt.block :][: scale.numel()] = scale
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, fmt: Format, out: Tensor) -> Tensor:
    """Writes the weights into `out`, contiguous, of their number of elements and any floating type; returns it.

    A product in float32 that is rounded once to the type of `out`.
    """
    if fused(out):
        return dequantize_triton(codes, scales, fmt, out)
    numel = out.numel()
    width = fmt.block * fmt.bits // 8
    padded = F.pad(codes, (0, scales.numel() * width - codes.numel())).view(-1, width)
    out.view(-1).copy_(fmt.decode(padded, scales).view(-1)[:numel])
    return out


def dequantize_triton(codes: Tensor, scales: Tensor, fmt: Format, out: Tensor) -> Tensor:
    """`dequantize` as a kernel."""
    rows = ELEMENTS // fmt.block
    grid = (triton.cdiv(scales.numel(), rows),)
    sizes: dict[str, Any] = {"BLOCK": fmt.block, "ROWS": rows, "num_warps": 4}
    if fmt is INT8:
        _int8_kernel[grid](codes, scales, out, out.numel(), **sizes)
    elif fmt is MXFP4:
        _mxfp4_kernel[grid](codes, scales, out, out.numel(), **sizes)
    else:
        _nf4_kernel[grid](codes, scales, _nf4_table(out.device), out, out.numel(), **sizes)
    return out


def _encode_nf4(w: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of the 16 values, the lower where two are as near."""
    scales = w.abs().amax(1)
    inverse = torch.where(scales == 0, 0, 1 / scales)
    table = torch.tensor(reference.NF4, device=w.device)
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(w * inverse[:, None], middles, out_int32=True).to(torch.uint8), scales


def _encode_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """OCP Microscaling Formats 1.0, section 6.3: nearest, ties to even; above 6 it saturates."""
    exponents = (torch.frexp(w.abs().amax(1)).exponent - 1 - 2 + 127).clamp(0, 254)  # 4 <= the largest code < 8
    scaled = torch.ldexp(w, (127 - exponents)[:, None])
    below = [torch.nextafter(torch.tensor(tie), torch.tensor(0.0)) for tie in (0.75, 1.75, 3.5)]
    ties = torch.tensor([0.25, below[0], 1.25, below[1], 2.5, below[2], 5.0], device=w.device)
    magnitudes = torch.bucketize(scaled.abs(), ties, out_int32=True).to(torch.uint8)
    return magnitudes | (torch.signbit(w).to(torch.uint8) << 3), exponents.to(torch.uint8)


def _encode_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    scales = w.abs().amax(1) / 127
    divisors = torch.where(scales == 0, 1, scales)
    return (w / divisors[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


NF4 = Format("nf4", 64, 4, True, torch.float32, _encode_nf4, reference.nf4_values)  # nibbles as bitsandbytes has them
MXFP4 = Format("mxfp4", 32, 4, False, torch.uint8, _encode_mxfp4, reference.mxfp4_values)  # as GPT-OSS has them
INT8 = Format("int8", 128, 8, False, torch.float32, _encode_int8, reference.int8_values)
FORMATS = {fmt.name: fmt for fmt in (NF4, MXFP4, INT8)}


@functools.cache
def _nf4_table(device: torch.device) -> Tensor:
    return torch.tensor(reference.NF4, device=device)


@triton.jit
def _load_4bit(codes, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Blocks of the program, and their codes: low and high halves [ROWS, BLOCK / 2]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    packed = tl.load(codes + at, mask=2 * at < numel, other=0).to(tl.int32)
    return rows, packed & 15, packed >> 4


@triton.jit
def _store(values, rows, out, numel, BLOCK: tl.constexpr):
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < numel)


@triton.jit
def _nf4_kernel(codes, scales, table, out, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows, low, high = _load_4bit(codes, numel, BLOCK, ROWS)
    scale = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0.0)
    pairs = tl.join(tl.load(table + high), tl.load(table + low))
    _store(tl.reshape(pairs, (ROWS, BLOCK)) * scale[:, None], rows, out, numel, BLOCK)


@triton.jit
def _e2m1(code):
    """float32 of a code: above 1 exponent and mantissa are those of float32, but for the bias."""
    magnitude = code & 7
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude << 22) + (126 << 23))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _mxfp4_kernel(codes, scales, out, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows, low, high = _load_4bit(codes, numel, BLOCK, ROWS)
    exponent = tl.load(scales + rows, mask=rows * BLOCK < numel, other=127).to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2 ** -127 is subnormal
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    scale = bits.to(tl.float32, bitcast=True)
    pairs = tl.join(_e2m1(low), _e2m1(high))
    _store(tl.reshape(pairs, (ROWS, BLOCK)) * scale[:, None], rows, out, numel, BLOCK)


@triton.jit
def _int8_kernel(codes, scales, out, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    code = tl.load(codes + at, mask=at < numel, other=0).to(tl.float32)
    scale = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0.0)
    _store(code * scale[:, None], rows, out, numel, BLOCK)
