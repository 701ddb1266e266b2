"""Rates of matrix products by type on each GPU, measured with the functions that training uses and kept for plans."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date

import torch
from torch import Tensor

from rptrain.bench import clock
from rptrain.doctor.checks import Check, check
from rptrain.doctor.failures import FAILURES, failed
from rptrain.engine.devices.accelerator import accelerator
from rptrain.kernels import fp8, fp8_products
from rptrain.kernels.launch import HAS_TRITON
from rptrain.kernels.toolchain_errors import explain
from rptrain.machine import rates as kept
from rptrain.machine.rates import GpuRates, Versions
from rptrain.schedule.machine import MeasuredRates, Rates, card_named
from rptrain.utils.nvml import Driver

TOKENS, INPUTS, OUTPUTS = 8192, 4096, 8192  # of the timed product, which fills every card
TURNS = 100  # timings of each product, about a second on the slowest card
BUSY = 10  # percent of recent time; beyond that other work uses the GPU
NAMES = {"bf16": "bfloat16", "fp16": "float16 with float16 sums", "fp8": "FP8"}


def used() -> list[int | None]:
    """The percentage of recent time in which other work used each GPU; None if the driver does not know it.

    Call it before this process uses the GPUs.
    """
    with Driver() as driver:
        return [_used(driver, index) for index in range(_count())]


def examine(used: Sequence[int | None], compiles: Sequence[bool]) -> list[Check]:
    """One check per GPU, or none if a check has said already why torch cannot compute on it. Keeps the rates for plans.

    `used`: from `used()`. `compiles`: whether kernels are compiled and run on each GPU.
    """
    found = [_examine(*each) for each in zip(range(_count()), used, compiles, strict=True)]
    measured = [rates for _, rates in found if rates is not None]
    problem = kept.keep(measured) if measured else None
    advice = f"plans use estimates, because the rates cannot be kept ({problem}): make the cache folder writable"
    checks = []
    for one, rates in found:
        if one is not None:
            lost = problem is not None and rates is not None
            checks.append(replace(one, status="warning", advice=advice) if lost else one)
    return checks


def _count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _used(driver: Driver, index: int) -> int | None:
    try:
        handle = driver.gpu(kept.uuid(index))
    except RuntimeError:  # the GPU has failed, as its checks say
        return None
    return None if handle is None else driver.status(handle).utilization


def _examine(index: int, used: int | None, compiles: bool) -> tuple[Check | None, GpuRates | None]:
    subject = f"cuda:{index} products"
    if used is not None and used > BUSY:
        advice = "run rptrain doctor again when nothing else uses the GPU: plans are made with measured rates"
        return check(subject, f"not measured: other work uses the GPU {used}% of the time", advice, used=used), None
    try:
        gpu = accelerator(index)
        with torch.cuda.device(index):
            with_fp8 = HAS_TRITON and compiles and gpu.target.has_fp8
            rates = measure(torch.device("cuda", index), with_fp8=with_fp8)
            torch.cuda.empty_cache()
        found = GpuRates(kept.uuid(index), gpu.name, Versions.here(), MeasuredRates(rates, date.today().isoformat()))
    except FAILURES as error:
        if not compiles and explain(error) is not None:
            return None, None
        return failed(subject, error, device=f"cuda:{index}"), None
    return describe(subject, found), found


def measure(device: torch.device, *, with_fp8: bool) -> Rates:
    """Times products of TOKENS x INPUTS with INPUTS x OUTPUTS matrices, in turn, each as a CUDA graph.

    Needs about 0.6 GiB. Raises RuntimeError if there is too little memory.
    """
    works = _works(device, with_fp8=with_fp8)
    seconds = clock.seconds(works, device, turns=TURNS, cold=False)
    operations = 2.0 * TOKENS * INPUTS * OUTPUTS
    return Rates(**{kind: operations / taken / 1e12 for kind, taken in seconds.items()})


def _works(device: torch.device, *, with_fp8: bool) -> Mapping[str, clock.Work]:
    """The products by type, with random operands, because the rate depends on the power that they draw."""
    x = torch.randn(TOKENS, INPUTS, dtype=torch.bfloat16, device=device)
    w = torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16, device=device)
    y, x_half, w_half = x.new_empty(TOKENS, OUTPUTS), x.half(), w.half()
    y_half = x_half.new_empty(TOKENS, OUTPUTS)
    works: dict[str, clock.Work] = {
        "bf16": lambda: torch.mm(x, w.t(), out=y),
        "fp16": lambda: _mm_with_half_sums(x_half, w_half, y_half),
    }
    if with_fp8:
        rows, columns = fp8.quantize_rows(x), fp8.quantize_rows(w)
        works["fp8"] = lambda: fp8_products.product(rows, columns, torch.bfloat16)
    return works


def _mm_with_half_sums(x: Tensor, w: Tensor, out: Tensor) -> None:
    """The product with half sums (`engine.fp16_accumulation`)."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = True
    try:
        torch.mm(x, w.t(), out=out)
    finally:
        matmul.allow_fp16_accumulation = before


def describe(subject: str, gpu: GpuRates) -> Check:
    """The rates in one line, each with its share of the data sheet's."""
    card = card_named(gpu.name)
    rates = asdict(gpu.measured.rates)
    peaks = {} if card is None else asdict(card.peak)
    texts = []
    for kind, rate in rates.items():
        if rate is not None:
            peak = peaks.get(kind)
            of = f" ({rate / peak:.2f} of the data sheet's {peak:g})" if peak else ""
            texts.append(f"{NAMES[kind]} {rate:.0f} TFLOP/s{of}")
    figures = {"uuid": gpu.uuid, "rates": rates, "peak": peaks or None, "date": gpu.measured.date}
    return check(subject, ", ".join(texts), **figures, **asdict(gpu.versions))
