"""Cards and the rates of their products, by type: of the data sheet, given, and measured."""

from dataclasses import replace

import pytest

from rptrain.schedule.costs import Work
from rptrain.schedule.machine import (
    CARDS,
    GROUPED,
    HOPPER,
    LAUNCH,
    LOW_RANK,
    MATMUL,
    QUANTIZATION,
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
    shares = {name: (card.shares.bf16, card.shares.fp16, card.shares.fp8) for name, card in CARDS.items()}
    assert shares == dict.fromkeys(PEAKS, (MATMUL,) * 3) | {
        "rtx3090": (1.03, MATMUL, MATMUL),
        "rtx4090": (0.96, MATMUL, 0.86),
        "rtx5090": (1.08, MATMUL, MATMUL),
        "h100": (0.70, 0.70, 0.63),
        "h200": (0.70, 0.70, 0.63),
    }


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
        ("matmul", 0.96 * 165, 150),
        ("half", 0.80 * 330, 290),
        ("half_attention", 0.60 * 330, 290 * 0.60 / 0.67),
        ("half_attention_backward", 0.325 * 330, 290 * 0.325 / 0.67),
        ("fp8", 0.86 * 330, 260),
        ("grouped", 0.86 * 0.96 * 165, 150 * 0.86),
        ("attention", 0.60 * 165, 150 * 0.60 / 0.67),
        ("attention_backward", 0.325 * 165, 150 * 0.325 / 0.67),
        ("delta_rule", 0.09 * 165, 150 * 0.09 / 0.67),
        ("delta_rule_backward", 0.07 * 165, 150 * 0.07 / 0.67),
    ],
    ids=[
        "matmul", "half", "half_attention", "half_attention_backward", "fp8", "grouped", "attention", "backward",
        "delta_rule", "delta_rule_backward",
    ],
)  # fmt: skip
def test_each_kind_of_operations_takes_its_own_rate(kind, rate, rate_measured):
    """Measured rates are what products reach: no share of a peak is applied to them.

    The rate of attention is in proportion to them; products were 0.67 of the peak where it was measured.
    """
    work = Work(**OF.get(kind, {}), **{kind: 1e13})
    assert CARDS["rtx4090"].seconds(work) == pytest.approx(10 / rate)
    assert measured("rtx4090").seconds(work) == pytest.approx(10 / rate_measured)
    more = work + Work(elementwise={"norm": 1e10}, quantization=2e10, low_rank=3e10)
    assert CARDS["rtx4090"].seconds(more) == pytest.approx(10 / rate + 6e10 / (TRAFFIC * 1008e9))
    assert CARDS["rtx4090"].seconds(Work(fp8=1.0)) == LAUNCH


def test_products_in_fp8_on_a_card_without_it_and_on_hopper():
    work = Work(fp8=1e13)
    assert CARDS["a100"].seconds(work) == CARDS["a100"].seconds(Work(matmul=1e13))
    assert CARDS["h200"].seconds(work) == pytest.approx(10 / (HOPPER.fp8 * 1979))
    without = replace(MEASURED, rates=Rates(150, 290))  # the kernels for it were not there
    assert measured("rtx4090", without).rates.fp8 == pytest.approx(0.86 * 330)


def test_where_rates_come_from():
    assert CARDS["a100"].rates_source == "estimated: 0.80 of the data sheet's peak"
    of_4090 = "estimated: 0.96 of the data sheet's peak, 0.86 in FP8, 0.80 with sums in float16"
    assert CARDS["rtx4090"].rates_source == of_4090
    assert CARDS["h200"].rates_source == "estimated: 0.70 of the data sheet's peak, 0.63 in FP8"
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
    assert work.with_half_sums(3.0) == Work(matmul=9.0, grouped=4.0, attention=2.0, attention_backward=5.0, half=6.0)
    assert work.with_half_sums(3.0).flops == work.flops == 20
    assert (work + work.with_half_sums()).half == 10 and work.without(work).flops == 0
    rule = Work(delta_rule=2.0, delta_rule_backward=5.0)
    assert (rule + work).flops == 27 and (rule + rule).without(rule) == rule
    assert GROUPED < 1


def test_kernels_that_do_more_than_copy_do_not_use_the_fastest_memory():
    """Quantization and the products of adapters, on the H200 on which they were measured and on a slower memory."""
    for kind, most in (("quantization", QUANTIZATION), ("low_rank", LOW_RANK)):
        assert CARDS["h200"].seconds(Work(**{kind: 1e10})) == pytest.approx(1e10 / most)
        assert CARDS["rtx3090"].seconds(Work(**{kind: 1e10})) == pytest.approx(1e10 / (TRAFFIC * 936e9))


@pytest.mark.parametrize("half", [False, True], ids=["float32_sums", "float16_sums"])
def test_edges_lengthen_attention_in_proportion(half):
    for kind in ("attention", "attention_backward"):
        work = Work(**{kind: 1e13} | ({f"half_{kind}": 1e13} if half else {}))
        longer = work + Work(edges=5e12)
        assert CARDS["rtx4090"].seconds(longer) == pytest.approx(1.5 * CARDS["rtx4090"].seconds(work))
        assert longer.without(Work(edges=5e12)) == work and longer.flops == work.flops


def test_an_update_takes_the_hosts_bandwidth():
    machine = Machine(CARDS["rtx4090"], 8, host_bandwidth=1e11, threads=16)
    assert machine.update_seconds(10**9, 26) == pytest.approx(0.26)
    assert machine.update_seconds(10**9, 26, thread_rate=1e9) == pytest.approx(0.26)
    assert machine.update_seconds(10**9, 26, thread_rate=0.2e9) == pytest.approx(1 / (16 * 0.2))
