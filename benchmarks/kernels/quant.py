"""Widening weights to bfloat16: the parameters of a block of Qwen3-1.7B, of Llama-3.1-8B, and GPT-OSS's experts."""

import torch

from benchmarks.kernels.case import Case
from rptrain.kernels import quant

SIZES = {"qwen3-1.7b block": 50_331_648, "llama-3.1-8b block": 218_103_808, "gpt-oss-20b experts": 796_262_400}


def cases() -> list[Case]:
    formats = (*quant.FORMATS.values(), quant.fp8_format(2048))
    return [_case(fmt, name, numel) for name, numel in SIZES.items() for fmt in formats]


def _case(fmt: quant.Format, name: str, numel: int) -> Case:
    generator = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(100, (fmt.code_bytes(numel),), device="cuda", generator=generator, dtype=fmt.code_dtype)
    scales = torch.rand(fmt.scale_count(numel), device="cuda", generator=generator).mul(100).to(fmt.scale_dtype)
    out = torch.empty(numel, dtype=torch.bfloat16, device="cuda")

    def eager() -> torch.Tensor:
        return fmt.decode(codes.view(scales.numel(), -1), scales).to(torch.bfloat16)

    return Case(
        f"dequantize {fmt.name}, {name}",
        lambda: quant.dequantize(codes, scales, fmt, out),
        {"compiled": torch.compile(eager)},
        codes.nbytes + scales.nbytes + out.nbytes,
    )
