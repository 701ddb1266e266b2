"""Codes against the published definitions, to the bit; kernels against the reference, to the bit."""

import math

import pytest
import torch
from torch import Tensor

from rptrain.kernels import quant
from rptrain.kernels.fp8 import FP8, Rows
from rptrain.kernels.quant import (
    FORMATS,
    INT8,
    MXFP4,
    NF4,
    Format,
    Quantized,
    dequantize,
    dequantize_triton,
    fp8_format,
    quantize,
)
from rptrain.kernels.reference import fp8 as reference_fp8
from rptrain.kernels.reference.quant import NF4 as NF4_VALUES
from rptrain.utils import native
from tests.kernels.test_fp8 import hard, same

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NF4_CODES = "11111122222333344445555666777888999aaabbbbccccdddddeeeeeeeefffff"
ALL = FORMATS | {"fp8": fp8_format(77)}
formats = pytest.mark.parametrize("fmt", ALL.values(), ids=list(ALL))


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dequantized(codes: Tensor, scales: Tensor, fmt: Format, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(codes, scales, fmt, torch.empty(numel, dtype=dtype))


@pytest.mark.sample(12)
@formats
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 31, 127, 129, 2048, 5001])
def test_kernel_gives_the_bits_of_the_reference(fmt, dtype, numel, device) -> None:
    codes, scales = quantize(weights(numel), fmt)
    ours = torch.full((numel + 64,), 7, dtype=dtype, device=device)
    dequantize_triton(codes.to(device), scales.to(device), fmt, ours[:numel])
    assert torch.equal(ours[:numel].cpu(), dequantized(codes, scales, fmt, numel, dtype))
    assert (ours[numel:] == 7).all()


@pytest.mark.parametrize("fmt", [NF4, MXFP4], ids=["nf4", "mxfp4"])
def test_codes_may_start_anywhere(fmt, device, monkeypatch) -> None:
    """They are read as words only from addresses that words may have; else a GPU would fail."""
    read, constants = [], quant.constants
    monkeypatch.setattr(quant, "constants", lambda fmt, words: read.append(words) or constants(fmt, words))
    codes, scales = quantize(weights(256), fmt)
    for first in range(5):
        moved = torch.cat((codes[:first], codes)).to(device)[first:]
        ours = dequantize_triton(moved, scales.to(device), fmt, torch.empty(256, device=device))
        assert torch.equal(ours.cpu(), dequantized(codes, scales, fmt, 256))
    assert read == [True, False, False, False, True]


@formats
def test_sizes_are_those_announced(fmt) -> None:
    codes, scales = quantize(weights(5, 77), fmt)
    assert (codes.numel(), scales.numel()) == (fmt.code_bytes(385), fmt.scale_count(385))
    assert (codes.dtype, scales.dtype) == (fmt.code_dtype, fmt.scale_dtype)


@pytest.fixture
def in_torch(monkeypatch) -> None:
    monkeypatch.setattr(native, "library", lambda module: None)


@pytest.fixture(params=["native", "torch"])
def in_torch_too(request, monkeypatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda module: None)


@pytest.mark.sample(6)
@formats
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_native_code_gives_the_bits_of_torch(fmt, dtype, monkeypatch) -> None:
    """Of blocks of all sizes, of zeros, of the least numbers, and where a value lies between two codes."""
    assert native.library("rptrain.kernels._quant"), "installed without a compiler"
    sizes = torch.cat((weights(40).mul(8).exp2(), torch.tensor([0.0, 2.0**-149, 2.0**-126, 1e38])))
    w = torch.cat([weights(512, seed=seed) * size for seed, size in enumerate(sizes)])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 4, -0.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5])
    halves = torch.arange(-64, 64) + 0.5  # of int8 codes
    w = torch.cat((w, ties.repeat(8), halves.clamp(-63.5, 127), torch.tensor([127.0]), weights(77)))
    w[~w.to(dtype).isfinite()] = 1
    found = quantize(w.to(dtype), fmt)
    monkeypatch.setattr(native, "library", lambda module: None)
    assert all(torch.equal(a, b) for a, b in zip(found, quantize(w.to(dtype), fmt), strict=True))


@formats
def test_chunks_do_not_change_codes(fmt, in_torch, monkeypatch) -> None:
    w = weights(1000)
    whole = quantize(w, fmt)
    monkeypatch.setattr(quant, "CHUNK", 256)
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize(w, fmt), strict=True))


@formats
def test_zeros_stay_zero_and_what_was_dequantized_gives_the_same_codes(fmt) -> None:
    w = weights(4096)
    w[128:256] = 0
    codes, scales = quantize(w, fmt)
    once = dequantized(codes, scales, fmt, w.numel())
    assert not once[128:256].any()
    again = quantize(once, fmt)
    assert torch.equal(dequantized(*again, fmt, w.numel()), once)
    if fmt.name != "fp8":  # in FP8 a largest value that was rounded down may halve the scale
        assert torch.equal(again[0], codes)


@formats
def test_a_power_of_two_changes_scales_only(fmt) -> None:
    w = weights(512)
    for factor in (2.0**-60, 2.0**60):
        assert torch.equal(quantize(w * factor, fmt)[0], quantize(w, fmt)[0])


@pytest.mark.parametrize(
    ("fmt", "expected"), [(NF4, 0.0912), (MXFP4, 0.1150), (INT8, 0.0063), (fp8_format(4096), 0.0263)], ids=list(ALL)
)
def test_error_on_normal_weights(fmt, expected) -> None:
    """Root-mean-square error of the format on a normal distribution; a wrong nibble order or scale is far off."""
    w = weights(1 << 16)
    error = (dequantized(*quantize(w, fmt), fmt, w.numel()) - w).square().mean().sqrt().item()
    assert error == pytest.approx(expected, rel=0.05)


def test_nf4_values_are_the_published_ones() -> None:
    """QLoRA, appendix E; they follow from its section 3 to the precision at which its authors computed."""
    published = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634
    0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = codes[0::2] << 4 | codes[1::2]
    ours = dequantized(packed, torch.ones(1), NF4, 16)
    assert torch.equal(ours, torch.tensor([float(value) for value in published.split()]))

    last = 1 - (1 / 32 + 1 / 30) / 2
    positive = torch.special.ndtri(torch.linspace(last, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(last, 0.5, 8, dtype=torch.float64)[:-1])
    quantiles = torch.cat((positive, negative, torch.zeros(1))).sort().values
    torch.testing.assert_close(ours, (quantiles / quantiles.max()).float(), rtol=0, atol=2e-6)


def test_nf4_takes_the_nearest_value() -> None:
    w = torch.cat((weights(4095).clamp(-0.99, 0.99), torch.ones(1))).view(64, 64)
    w[:, 0] = -1.0  # the scale of each block
    table = torch.tensor(NF4_VALUES)
    nearest = table[(w.flatten()[:, None] - table).abs().argmin(1)]
    assert torch.equal(dequantized(*quantize(w, NF4), NF4, w.numel()), nearest)


def test_nf4_takes_the_lower_of_two_that_are_as_near() -> None:
    """As bitsandbytes does."""
    table = torch.tensor(NF4_VALUES)
    middles = (table[1:] + table[:-1]) / 2
    for w, first in ((middles, 0), (torch.nextafter(middles, torch.tensor(2.0)), 1)):
        codes, _ = quantize(torch.cat((torch.ones(1), w)), NF4)
        each = torch.stack((codes >> 4, codes & 15), 1).flatten()
        assert each.tolist() == [15, *range(first, first + 15)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_is_what_bitsandbytes_makes(dtype) -> None:
    """Codes, scales and the dequantized weights, to the bit."""
    theirs = pytest.importorskip("bitsandbytes.functional")
    w = weights(96, 320).to(dtype)
    w[3] = 0
    codes, state = theirs.quantize_4bit(w, blocksize=64, compress_statistics=False, quant_type="nf4")
    ours = quantize(w, NF4)
    assert torch.equal(ours[0], codes.flatten()) and torch.equal(ours[1], state.absmax)
    assert torch.equal(dequantized(*ours, NF4, w.numel(), dtype), theirs.dequantize_4bit(codes, state).flatten())


def test_nf4_of_known_weights() -> None:
    """As bitsandbytes 0.50 stores them."""
    w = torch.linspace(-1.5, 2.0, 64)
    codes, scales = quantize(w, NF4)
    assert codes.numpy().tobytes().hex() == NF4_CODES
    assert scales.tolist() == [2.0]


@formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_seen(fmt, dtype) -> None:
    for value in (math.inf, -math.inf, math.nan):
        w = weights(512).to(dtype)
        assert quant.finite(Quantized(*quantize(w, fmt), fmt).checked)
        w[300] = value
        assert not quant.finite(Quantized(*quantize(w, fmt), fmt).checked)


@pytest.mark.sample(10)
@pytest.mark.parametrize(("rows", "columns"), [(1, 5000), (7, 1), (33, 77), (5, 2048), (3, 14336)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_fp8_rows_have_the_codes_and_scales_of_products_in_fp8(rows, columns, dtype, in_torch_too) -> None:
    w = hard(rows, columns, dtype)
    codes, scales = quantize(w, fp8_format(columns))
    same(Rows(codes.view(FP8).view(rows, columns), scales), Rows(*reference_fp8.quantize(w, None)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [256, 259])
def test_fp8_codes_are_what_torch_reads(dtype, columns, device) -> None:
    """All codes under all scales, into all types: denormal, negative zero, NaN, and what overflows or vanishes."""
    codes = torch.arange(columns).to(torch.uint8).view(torch.int8).repeat(254)
    scales = (torch.arange(1, 255, dtype=torch.int32) << 23).view(torch.float32)
    ours = torch.empty(254, columns, dtype=dtype, device=device)
    dequantize_triton(codes.to(device), scales.to(device), fp8_format(columns), ours)
    values = codes.view(FP8).double().view(254, columns) * scales.double()[:, None]
    expected = values.float().to(dtype)
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    number = ~expected.isnan()
    assert torch.equal(torch.signbit(ours.cpu())[number], torch.signbit(expected)[number])
    plainly = dequantized(codes, scales, fp8_format(columns), ours.numel(), dtype).view(ours.shape)
    torch.testing.assert_close(plainly, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_dequantized_as_transformers_does(dtype, device) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 5, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 160, (2, 5, 3), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    ours = torch.empty(2, 5, 96, dtype=dtype, device=device)
    dequantize_triton(blocks.flatten().to(device), scales.flatten().to(device), MXFP4, ours)
    assert torch.equal(ours.cpu(), expected)


def test_mxfp4_table_and_scales(device) -> None:
    """The 16 codes of OCP's table and every scale, 2 ** -127 and NaN among them."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor([*magnitudes, *(-value for value in magnitudes)])
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[1::2] << 4 | codes[0::2]).repeat(256 * 2)
    exponents = torch.arange(256)
    ours = torch.empty(256 * 32, device=device)
    dequantize_triton(packed.to(device), exponents.to(torch.uint8).to(device), MXFP4, ours)
    factors = torch.tensor([2.0 ** (int(exponent) - 127) for exponent in exponents[:-1]] + [math.nan])
    expected = (table.double().repeat(2) * factors.double()[:, None]).float()
    torch.testing.assert_close(ours.cpu().view(256, 32), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(ours.cpu().view(256, 32)[127]), torch.signbit(table.repeat(2)))
    assert torch.equal(dequantized(packed, exponents.to(torch.uint8), MXFP4, 8192)[:-32], ours.cpu()[:-32])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0),
        (0.26, 0.5),
        (0.75, 1),
        (1.25, 1),
        (1.75, 2),
        (2.5, 2),
        (3.5, 4),
        (5, 4),
        (5.01, 6),
        (7.9, 6),
        (-5, -4),
    ],
)
def test_mxfp4_rounds_to_even_and_saturates(value, expected) -> None:
    """OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3; the 4 makes the block's scale 1."""
    w = torch.zeros(32)
    w[:2] = torch.tensor([4.0, value])
    codes, scales = quantize(w, MXFP4)
    assert scales.item() == 127
    assert dequantized(codes, scales, MXFP4, 32)[1] == expected


def test_int8_is_symmetric() -> None:
    w = torch.tensor([-2.54, 1.27, 0.0, 0.02])
    codes, scales = quantize(w, INT8)
    assert codes.tolist() == [-127, 64, 0, 1]  # 63.5 goes to the even
    assert scales.item() == pytest.approx(0.02)
