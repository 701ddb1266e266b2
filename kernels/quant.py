"""Weights in 4 and 8 bits: NF4, MXFP4, int8 and FP8, quantized on the CPU (in C, or PyTorch) and dequantized by Triton.

A block of consecutive elements of the flattened tensor shares a scale; the last block may be shorter.
Dequantization never waits for the device; quantization, which happens once when a model is loaded, does.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels.fp8 import FP8, Rows
from rptrain.kernels.fp8_host import quantize_rows_into
from rptrain.kernels.launch import fused, jit, tl, triton
from rptrain.kernels.reference import fp8 as reference_fp8
from rptrain.kernels.reference import quant as reference
from rptrain.utils import native

# Elements that PyTorch quantizes or dequantizes at a time: temporaries fit in a core's cache.
CHUNK = 2**18
ALIGNMENT = 256  # bytes: codes and scales in one buffer begin at multiples
ELEMENTS = 2048  # of a program, in 8 bits
LANES = 128  # threads of a program, in 4 bits
WORDS = 4 * LANES  # of 8 codes, of a program
NATIVE = (torch.bfloat16, torch.float16, torch.float32)  # what quant.c and fp8.c read
NO_NUMBER = 255  # the exponent of a scale that is none


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

    def whole(self, numel: int) -> int:
        """The largest number of elements in whole blocks that is not above `numel`; at least one block."""
        return max(numel // self.block, 1) * self.block

    def code_bytes(self, numel: int) -> int:
        return math.ceil(numel * self.bits / 8)

    def scale_count(self, numel: int) -> int:
        return math.ceil(numel / self.block)

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.uint8 if self.bits == 4 else torch.int8

    def nbytes(self, numel: int) -> int:
        """Bytes of codes and scales in one buffer, padding included."""
        return _aligned(self.code_bytes(numel)) + _aligned(self.scale_count(numel) * self.scale_dtype.itemsize)


class Quantized(NamedTuple):
    """Weights in a format: codes and scales, views of one buffer."""

    codes: Tensor
    scales: Tensor
    format: Format

    @classmethod
    def of(cls, buffer: Tensor, numel: int, fmt: Format) -> "Quantized":
        """A view of `fmt.nbytes(numel)` bytes: the codes, then the scales."""
        codes = fmt.code_bytes(numel)
        scales = buffer[_aligned(codes) :][: fmt.scale_count(numel) * fmt.scale_dtype.itemsize]
        return cls(buffer[:codes].view(fmt.code_dtype), scales.view(fmt.scale_dtype), fmt)

    @property
    def numel(self) -> int:
        """The number of elements, in whole blocks."""
        return self.scales.numel() * self.format.block

    @property
    def checked(self) -> Tensor:
        """What `finite` reads: the scales, or of FP8 the codes."""
        return self.codes.view(FP8) if self.format.name == FP8_NAME else self.scales

    def part(self, start: int, stop: int) -> "Quantized":
        """Elements [start, stop), whole blocks, as a view."""
        fmt = self.format
        codes = self.codes[fmt.code_bytes(start) : fmt.code_bytes(stop)]
        return Quantized(codes, self.scales[fmt.scale_count(start) : fmt.scale_count(stop)], fmt)

    def write(self, w: Tensor) -> None:
        """Quantizes weights, as many as these are, of any floating type."""
        quantize_into(w, self.codes, self.scales, self.format)

    def dequantize(self, out: Tensor) -> Tensor:
        """`dequantize`."""
        return dequantize(self.codes, self.scales, self.format, out)


def quantize(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Codes [code_bytes] and scales [scale_count] of weights of any shape; the same bits on every device.

    A block of zeros stays zero. A block that is not all finite is seen by its scale, which is infinite or NaN, or in
    FP8 by its codes.
    """
    codes = torch.empty(fmt.code_bytes(w.numel()), dtype=fmt.code_dtype, device=w.device)
    scales = torch.empty(fmt.scale_count(w.numel()), dtype=fmt.scale_dtype, device=w.device)
    Quantized(codes, scales, fmt).write(w)
    return codes, scales


def quantize_into(w: Tensor, codes: Tensor, scales: Tensor, fmt: Format) -> None:
    """`quantize` to where codes and scales belong, both contiguous.

    Contiguous weights on the CPU of at most 32 bits take no memory beside.
    """
    flat = w.reshape(-1)
    compiled = native.library("rptrain.kernels._quant")
    if compiled and w.is_cpu and w.dtype in NATIVE:
        assert codes.is_contiguous() and scales.is_contiguous()
        assert (len(codes), len(scales)) == (fmt.code_bytes(len(flat)), fmt.scale_count(len(flat)))
        if fmt.name == FP8_NAME:
            _quantize_rows(flat, codes, scales, fmt.block)
            return
        quantize_here = getattr(compiled, f"quantize_{fmt.name}_{native.suffix(w.dtype)}")
        places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, scales))
        quantize_here(ctypes.c_void_p(flat.data_ptr()), ctypes.c_int64(len(flat)), *places)
        return
    chunk = fmt.whole(CHUNK)
    for begin in range(0, flat.numel(), chunk):
        part = flat[begin : begin + chunk].float()
        blocks = F.pad(part, (0, -part.numel() % fmt.block)).view(-1, fmt.block)
        each, scale = fmt.encode(blocks)
        if fmt.bits == 4:
            first, second = each[:, 0::2], each[:, 1::2]
            each = (first << 4 | second) if fmt.high_first else (second << 4 | first)
        size = fmt.code_bytes(part.numel())
        start = fmt.code_bytes(begin)
        codes[start : start + size] = each.reshape(-1)[:size]
        scales[begin // fmt.block :][: scale.numel()] = scale


def _quantize_rows(flat: Tensor, codes: Tensor, scales: Tensor, size: int) -> None:
    """Rows of `size` weights to FP8 in native code; the last row may be shorter."""
    codes, whole = codes.view(FP8), len(flat) // size
    stop = whole * size
    quantize_rows_into(flat[:stop].view(whole, size), Rows(codes[:stop].view(whole, size), scales[:whole]))
    if stop < len(flat):
        quantize_rows_into(flat[None, stop:], Rows(codes[None, stop:], scales[whole:]))


def dequantize(codes: Tensor, scales: Tensor, fmt: Format, out: Tensor) -> Tensor:
    """Writes the weights into `out`, contiguous, of their number of elements and any floating type; returns it.

    A product in float32 that is rounded once to the type of `out`.
    """
    if fused(out):
        return dequantize_triton(codes, scales, fmt, out)
    width, chunk = fmt.block * fmt.bits // 8, fmt.whole(CHUNK)
    for begin, part in enumerate(out.view(-1).split(chunk)):
        numel, start = part.numel(), begin * chunk
        each = codes[fmt.code_bytes(start) :][: fmt.code_bytes(numel)]
        factors = scales[fmt.scale_count(start) :][: fmt.scale_count(numel)]
        padded = F.pad(each, (0, math.ceil(numel / fmt.block) * width - each.numel())).view(-1, width)
        part.copy_(fmt.decode(padded, factors).view(-1)[:numel])
    return out


def dequantize_triton(codes: Tensor, scales: Tensor, fmt: Format, out: Tensor) -> Tensor:
    """`dequantize` as a kernel."""
    if fmt is INT8:
        rows = ELEMENTS // fmt.block
        grid = (triton.cdiv(scales.numel(), rows),)
        _int8_kernel[grid](codes, scales, out, out.numel(), BLOCK=fmt.block, ROWS=rows, num_warps=4)
    elif fmt.name == FP8_NAME:
        grid = (triton.cdiv(out.numel(), ELEMENTS),)
        _fp8_kernel[grid](codes, scales, out, out.numel(), SIZE=fmt.block, ELEMENTS=ELEMENTS, num_warps=4)
    else:
        values = table(fmt.name, out.device)
        words = out.numel() % 8 == 0 and codes.data_ptr() % 4 == 0
        grid = (triton.cdiv(out.numel(), 8 * WORDS),)
        _4bit_kernel[grid](codes, scales, values, out, out.numel(), **constants(fmt, words))
    return out


def constants(fmt: Format, words: bool) -> dict[str, Any]:
    """The constants of the kernel of a 4-bit format; `words`: codes can be read 32 bits at a time."""
    options = {"BLOCK": fmt.block, "HIGH_FIRST": int(fmt.high_first), "EXPONENTS": fmt is MXFP4, "AS_WORDS": words}
    return options | {"TILES": WORDS // LANES, "LANES": LANES, "num_warps": LANES // 32}


def finite(scales: Tensor) -> bool:
    """Whether these scales of any format, or codes in FP8, are all finite, and so the weights that they belong to."""
    if scales.dtype == FP8:
        return not bool(((scales.view(torch.uint8) & reference_fp8.NAN) == reference_fp8.NAN).any())
    if scales.is_floating_point():
        return all(bool(bound.isfinite()) for bound in torch.aminmax(scales))  # no memory beside; NaN spreads to both
    return not bool((scales == NO_NUMBER).any())


def _encode_nf4(w: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of the 16 values, the lower where two are as near."""
    scales = w.abs().amax(1)
    inverse = torch.where(scales == 0, 0, 1 / scales)
    table = torch.tensor(reference.NF4)
    middles = (table[1:] + table[:-1]) / 2
    return _rank(w * inverse[:, None], middles), scales


def _encode_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """OCP Microscaling Formats 1.0, section 6.3: nearest, ties to even; above 6 it saturates."""
    largest = w.abs().amax(1)
    exponents = (torch.frexp(largest).exponent - 1 - 2 + 127).clamp(0, 254)  # 4 <= the largest code < 8
    exponents = exponents.masked_fill_(~largest.isfinite(), NO_NUMBER)
    scaled = torch.ldexp(w, (127 - exponents)[:, None])
    below = [torch.nextafter(torch.tensor(tie), torch.tensor(0.0)) for tie in (0.75, 1.75, 3.5)]
    ties = torch.tensor([0.25, below[0], 1.25, below[1], 2.5, below[2], 5.0])
    magnitudes = _rank(scaled.abs(), ties)
    return magnitudes | (torch.signbit(w).to(torch.uint8) << 3), exponents.to(torch.uint8)


def _rank(x: Tensor, bounds: Tensor) -> Tensor:
    """How many of a few bounds, on the CPU, are below each of x: uint8. Vectorized, where a search by halves is not."""
    rank = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for bound in bounds.tolist():
        rank += x > bound
    return rank


def _encode_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    scales = w.abs().amax(1) / 127
    divisors = torch.where(scales == 0, 1, scales)
    return (w / divisors[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def _encode_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = reference_fp8.quantize(w, None)
    return codes.view(torch.int8), scales


NF4 = Format("nf4", 64, 4, True, torch.float32, _encode_nf4, reference.nf4_values)  # nibbles as bitsandbytes has them
MXFP4 = Format("mxfp4", 32, 4, False, torch.uint8, _encode_mxfp4, reference.mxfp4_values)  # as GPT-OSS has them
INT8 = Format("int8", 128, 8, False, torch.float32, _encode_int8, reference.int8_values)
FP8_NAME = "fp8"
FORMATS = {fmt.name: fmt for fmt in (NF4, MXFP4, INT8)}  # those with blocks of one size


@functools.cache
def fp8_format(size: int) -> Format:
    """FP8 (e4m3) with a scale for each row of `size` weights: the codes and scales of kernels/fp8.py."""
    return Format(FP8_NAME, size, 8, False, torch.float32, _encode_fp8, reference.fp8_values)


def format_of(name: str, size: int) -> Format:
    """The format of this name, of a matrix with rows of `size` weights."""
    return fp8_format(size) if name == FP8_NAME else FORMATS[name]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def make_tables(device: torch.device) -> None:
    """Makes what `dequantize` keeps on a device: to be called outside of a pool of memory that graphs share.

    What they use in passing would be written over.
    """
    for fmt in (NF4, MXFP4):
        table(fmt.name, device)


@functools.cache
def table(name: str, device: torch.device) -> Tensor:
    """float32 of each code."""
    e2m1 = reference.E2M1
    values = reference.NF4 if name != MXFP4.name else (*e2m1, *(-value for value in e2m1))
    return torch.tensor(values, device=device)


@jit
def _4bit_kernel(
    codes, scales, table, out, numel,
    BLOCK: tl.constexpr,
    HIGH_FIRST: tl.constexpr,  # 0 or 1
    EXPONENTS: tl.constexpr,  # scales are exponents of two
    AS_WORDS: tl.constexpr,
    TILES: tl.constexpr,  # words in a thread
    LANES: tl.constexpr,  # threads
):  # fmt: skip
    """8 codes, a word of 32 bits, become 8 neighbors in one thread: a store of 16 bytes in 16-bit types.

    All words and scales are read before the first is dequantized.
    """
    first = tl.program_id(0).to(tl.int64) * (TILES * LANES)  # word
    left = tl.minimum(numel - first * 8, TILES * LANES * 8).to(tl.int32)  # elements
    codes += first * 4
    out += first * 8
    scales += first * 8 // BLOCK
    lanes = tl.arange(0, LANES)
    words, factors = (), ()
    for i in tl.static_range(TILES):
        at = i * LANES + lanes
        inside = at * 8 < left
        if AS_WORDS:
            words += (tl.load(codes.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0),)
        else:
            words += (_word(codes, at, left),)
        factors += (tl.load(scales + at * 8 // BLOCK, mask=inside, other=0),)
    for i in tl.static_range(TILES):
        factor = power_of_2_scale(factors[i]) if EXPONENTS else factors[i]
        x = ()
        for j in tl.static_range(8):
            x += (tl.load(table + decode_4bit(words[i], j, HIGH_FIRST)) * factor,)
        values = tl.reshape(_side_by_side(x), (LANES, 8))
        begin = (i * LANES + lanes)[:, None] * 8
        at = begin + tl.arange(0, 8)[None, :]
        inside = begin < left if AS_WORDS else at < left  # one for a word: it is stored at once
        tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@jit
def decode_4bit(word, i, HIGH_FIRST: tl.constexpr):
    """Code i of a word."""
    return (word >> (4 * (i ^ HIGH_FIRST))) & 15


@jit
def _side_by_side(x):
    """[..., 2, 2, 2] of 8: each join adds a last dimension, and element 4 a + 2 b + c stands at [a, b, c]."""
    even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.join(even, odd)


@jit
def _word(codes, at, left):
    """The bytes of a word one by one: the last ones may be missing, and words not aligned."""
    word = tl.zeros(at.shape, tl.int32)
    for i in tl.static_range(4):
        byte = tl.load(codes + at * 4 + i, mask=at * 8 + 2 * i < left, other=0)
        word |= byte.to(tl.int32) << (8 * i)
    return word


@jit
def power_of_2_scale(exponent):
    """float32 of 2 ** (exponent - 127), NaN for 255."""
    exponent = exponent.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2 ** -127 is subnormal
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def _int8_kernel(codes, scales, out, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    code = tl.load(codes + at, mask=at < numel, other=0).to(tl.float32)
    scale = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0.0)
    tl.store(out + at, (code * scale[:, None]).to(out.dtype.element_ty), mask=at < numel)


@jit
def _fp8_kernel(codes, scales, out, numel, SIZE: tl.constexpr, ELEMENTS: tl.constexpr):
    """Decodes by integer arithmetic, because GPUs before 8.9 have no conversion."""
    first = tl.program_id(0).to(tl.int64) * ELEMENTS
    row = first // SIZE
    lanes = tl.arange(0, ELEMENTS)
    inside = lanes < tl.minimum(numel - first, ELEMENTS).to(tl.int32)
    code = tl.load(codes + first + lanes, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row + ((first - row * SIZE).to(tl.int32) + lanes) // SIZE, mask=inside, other=0.0)
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)  # the exponent's bias is 127 instead of 7
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # in steps of 2^-9
    value = tl.where(size == 0x7F, float("nan"), value)
    signed = (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    tl.store(out + first + lanes, (signed * scale).to(out.dtype.element_ty), mask=inside)
