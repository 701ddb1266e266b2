"""Cards and the rates of their products, by type: of the data sheet, given, and measured."""

from dataclasses import replace

import pytest

from rptrain.schedule.costs import Work
from rptrain.schedule.machine import (
    CARDS,
    GROUPED,
    HOPPER_FP8,
    LAUNCH,
    MATMUL,
    TRAFFIC,
    Card,
    Machine,
    MeasuredRates,
    Rates,
    with_rates,
)

PEAKS = {
    "rtx3090": (71, 142, None),
    "rtx4090": (165, 330, 330),
    "rtx5090": (209, 419, 419),
    "l40s": (362, 362, 733),
    "a100": (312, 312, None),
    "a800": (312, 312, None),
    "h100": (989, 989, 1979),
    "h200": (989, 989, 1979),
}
MEASURED = MeasuredRates(Rates(150, 290, 260), "2026-11-24")


def test_the_data_sheets_rates():
    assert {name: (card.peak.bf16, card.peak.fp16, card.peak.fp8) for name, card in CARDS.items()} == PEAKS
    shares = {name: card.fp8_share for name, card in CARDS.items()}
    assert shares == dict.fromkeys(PEAKS, MATMUL) | {"h100": HOPPER_FP8, "h200": HOPPER_FP8}


def measured(card: str, rates: MeasuredRates = MEASURED) -> Card:
    return replace(CARDS[card], measured=rates)


OF = {  # what includes these operations
    "half": {"matmul": 1e13},
    "half_attention": {"attention": 1e13},
    "half_attention_backward": {"attention_backward": 1e13},
}


@pytest.mark.parametrize(
    ("kind", "rate", "rate_measured"),
    [
        ("matmul", 0.80 * 165, 150),
        ("half", 0.80 * 330, 290),
        ("half_attention", 0.59 * 330, 290 * 0.59 / 0.67),
        ("half_attention_backward", 0.32 * 330, 290 * 0.32 / 0.67),
        ("fp8", 0.80 * 330, 260),
        ("grouped", 0.61 * 165, 150 * 0.61 / 0.80),
        ("attention", 0.59 * 165, 150 * 0.59 / 0.67),
        ("attention_backward", 0.32 * 165, 150 * 0.32 / 0.67),
    ],
    ids=["matmul", "half", "half_attention", "half_attention_backward", "fp8", "grouped", "attention", "backward"],
)
def test_each_kind_of_operations_takes_its_own_rate(kind, rate, rate_measured):
    """Measured rates are what products reach: no share of a peak is applied to them.

    The rate of attention is in proportion to them; products were 0.67 of the peak where it was measured.
    """
    work = Work(**OF.get(kind, {}), **{kind: 1e13})
    assert CARDS["rtx4090"].seconds(work) == pytest.approx(10 / rate)
    assert measured("rtx4090").seconds(work) == pytest.approx(10 / rate_measured)
    more = work + Work(elementwise={"norm": 1e10}, quantization=2e10)
    assert CARDS["rtx4090"].seconds(more) == pytest.approx(10 / rate + 3e10 / (TRAFFIC * 1008e9))
    assert CARDS["rtx4090"].seconds(Work(fp8=1.0)) == LAUNCH


def test_products_in_fp8_on_a_card_without_it_and_on_hopper():
    work = Work(fp8=1e13)
    assert CARDS["a100"].seconds(work) == CARDS["a100"].seconds(Work(matmul=1e13))
    assert CARDS["h200"].seconds(work) == pytest.approx(10 / (HOPPER_FP8 * 1979))
    without = replace(MEASURED, rates=Rates(150, 290))  # the kernels for it were not there
    assert measured("rtx4090", without).rates.fp8 == pytest.approx(0.80 * 330)


def test_where_rates_come_from():
    assert CARDS["rtx4090"].rates_source == "estimated: 0.80 of the data sheet's peak"
    assert CARDS["h100"].rates_source == "estimated: 0.80 of the data sheet's peak, 0.62 in FP8"
    assert measured("h100").rates_source == "measured by rptrain doctor on 2026-11-24"
    unknown = Card("Quadro P400", 2 << 30, Rates(2, 2), 32e9, 12e9)
    assert unknown.rates_source == "estimated: 0.80 of a peak that is guessed from the driver's figures"


def test_given_rates():
    card = CARDS["rtx4090"]
    assert with_rates(card, vram=None, pcie=None) == card
    assert with_rates(card, vram=None, pcie=None, bf16=330).peak == Rates(330, 660, 660)
    assert with_rates(card, vram=None, pcie=None, bf16=100, fp8=150).peak == Rates(100, 200, 150)
    assert with_rates(CARDS["a100"], vram=8, pcie=1e9, fp16=624).peak == Rates(312, 624)
    changed = with_rates(card, vram=8, pcie=1e9)
    assert (changed.vram, changed.pcie, changed.peak) == (8, 1e9, card.peak)


def test_work_with_sums_in_float16():
    work = Work(matmul=9.0, grouped=4.0, attention=2.0, attention_backward=5.0, half=1.0)
    assert work.in_half(3.0) == Work(matmul=9.0, grouped=4.0, attention=2.0, attention_backward=5.0, half=6.0)
    assert work.in_half(3.0).flops == work.flops == 20
    assert (work + work.in_half()).half == 10 and work.without(work).flops == 0
    assert GROUPED < MATMUL


def test_an_update_takes_the_hosts_bandwidth():
    machine = Machine(CARDS["rtx4090"], 8, host_bandwidth=1e11, threads=16)
    assert machine.update_seconds(10**9, 26) == pytest.approx(0.26)
    assert machine.update_seconds(10**9, 26, thread_rate=1e9) == pytest.approx(0.26)
    assert machine.update_seconds(10**9, 26, thread_rate=0.2e9) == pytest.approx(1 / (16 * 0.2))
