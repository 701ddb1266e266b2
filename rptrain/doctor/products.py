"""Rates of matrix products by type on each GPU, measured with the functions that training uses and kept for plans."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date

import torch
from torch import Tensor

from rptrain.bench import clock
from rptrain.doctor.checks import Check, check
from rptrain.doctor.gpu import unmeasured
from rptrain.kernels import fp8, fp8_products
from rptrain.kernels.launch import HAS_TRITON
from rptrain.planner import rates as kept
from rptrain.planner.hardware import FP8_CAPABILITY
from rptrain.planner.rates import GpuRates, Versions
from rptrain.schedule.machine import MeasuredRates, Rates, card_named
from rptrain.utils.nvml import Driver

TOKENS, INPUTS, OUTPUTS = 8192, 4096, 8192  # of the timed product, which fills every card
TURNS = 100  # timings of each product, about a second on the slowest card
BUSY = 10  # percent of recent time; beyond that other work uses the GPU
NAMES = {"bf16": "bfloat16", "fp16": "float16 with float16 sums", "fp8": "FP8"}


def examine() -> list[Check]:
    """One check per GPU. Keeps what was measured for plans."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: list[tuple[Check, GpuRates | None]] = []
    with Driver() as driver:
        for index in range(count):
            found.append(_examine(driver, index))
    measured = [rates for _, rates in found if rates is not None]
    problem = kept.keep(measured) if measured else None
    if problem is None:
        return [one for one, _ in found]
    advice = f"plans use estimates, because the rates cannot be kept ({problem}): make the cache folder writable"
    return [one if rates is None else replace(one, status="warning", advice=advice) for one, rates in found]


def _examine(driver: Driver, index: int) -> tuple[Check, GpuRates | None]:
    subject, uuid = f"cuda:{index} products", kept.uuid(index)
    handle = driver.gpu(uuid)
    used = None if handle is None else driver.status(handle).utilization
    if used is not None and used > BUSY:
        advice = "run rptrain doctor again when nothing else uses the GPU: plans are made with measured rates"
        return check(subject, f"not measured: other work uses the GPU {used}% of the time", advice, used=used), None
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    try:
        with torch.cuda.device(index):
            rates = measure(torch.device("cuda", index), with_fp8=HAS_TRITON and capability >= FP8_CAPABILITY)
            torch.cuda.empty_cache()
    except RuntimeError as error:  # out of memory, or the GPU has failed
        return unmeasured(subject, error, device=f"cuda:{index}"), None
    found = GpuRates(uuid, name, Versions.here(), MeasuredRates(rates, date.today().isoformat()))
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
        "fp16": lambda: _mm_in_half(x_half, w_half, y_half),
    }
    if with_fp8:
        rows, columns = fp8.quantize_rows(x), fp8.quantize_rows(w)
        works["fp8"] = lambda: fp8_products.product(rows, columns, torch.bfloat16)
    return works


def _mm_in_half(x: Tensor, w: Tensor, out: Tensor) -> None:
    """The product with sums in float16, as with `engine.fp16_accumulation`."""
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
