"""Machines as values: cards, their rates and links, so that plans can be made for hypothetical machines."""

from dataclasses import dataclass, replace
from math import inf

from rptrain.schedule.costs import Work

GB, GIB = 10**9, 2**30

# The fraction of the data sheet's peak that matrix products reach in training, for cards without published figures.
MATMUL = 0.80
GROUPED = 0.86  # the rate of products of experts, as a fraction of that of other products: measured on an H200
# The fractions of the peak that attention reaches with long sequences, measured in training on an H200; `Work.edges` is
# what shorter ones cost. The backward is deterministic: it computes the scores twice, which are counted once.
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.60, 0.325
# The fractions of the peak that the gated delta rule reaches, measured on an H200 with documents of 2,048 tokens and
# 48 heads; with one document of 65,536 tokens they are a tenth less.
DELTA_RULE_FORWARD, DELTA_RULE_BACKWARD = 0.09, 0.07
# The fraction of the peak that `rptrain doctor` measures for products on an H200, where power limits them. Where
# rates were measured, those of attention and of the delta rule are in proportion to it.
MATMUL_MEASURED = 0.67
TRAFFIC = 0.85  # the fraction of a card's memory bandwidth that copies reach
# The most bytes per second of kernels that do more than copy, measured in training on an H200: quantization of
# operands, and products with the matrices of adapters. The memory of other cards is slower and limits both.
QUANTIZATION, LOW_RANK = 1.9e12, 2.6e12
# The fraction of a network's rate that TCP carries: 1,448 of the 1,538 bytes that a frame takes on Ethernet.
GOODPUT = 0.94
LAUNCH = 0.2e-3  # minimum seconds of a pass over a layer: its kernel launches


@dataclass(frozen=True)
class Rates:
    """Rates of dense matrix products by type, in 1e12 operations per second."""

    bf16: float  # operands in bfloat16 or float16, sums in float32
    fp16: float  # operands and sums in float16
    fp8: float | None = None  # operands in FP8, sums in float32; None: the card has no FP8, or it was not measured


@dataclass(frozen=True)
class MeasuredRates:
    """Rates that `rptrain doctor` measured, and the day in ISO format."""

    rates: Rates
    date: str


@dataclass(frozen=True)
class Shares:
    """The fractions of the data sheet's peaks that products reach in training, by type; see `Rates`."""

    bf16: float = MATMUL
    fp16: float = MATMUL
    fp8: float = MATMUL


@dataclass(frozen=True)
class Card:
    """A GPU with the figures of its data sheet; `pcie` is the achieved copy rate in one direction."""

    name: str
    vram: int  # bytes
    peak: Rates  # of the data sheet
    bandwidth: float  # bytes per second of its own memory
    pcie: float  # bytes per second
    shares: Shares = Shares()  # docs/benchmarks/plans.md has the sources
    measured: MeasuredRates | None = None  # replaces the shares of the peak

    @property
    def rates(self) -> Rates:
        """The rates that products reach: measured, otherwise assumed shares of the peak."""
        peak, shares = self.peak, self.shares
        assumed = Rates(shares.bf16 * peak.bf16, shares.fp16 * peak.fp16, peak.fp8 and shares.fp8 * peak.fp8)
        if self.measured is None:
            return assumed
        return replace(self.measured.rates, fp8=self.measured.rates.fp8 or assumed.fp8)

    @property
    def rates_source(self) -> str:
        """How `rates` are known, as the end of a sentence."""
        if self.measured is not None:
            return f"measured by rptrain doctor on {self.measured.date}"
        of = "the data sheet's peak" if card_named(self.name) else "a peak that is guessed from the driver's figures"
        shares = self.shares
        fp8 = f", {shares.fp8:.2f} in FP8" if self.peak.fp8 and shares.fp8 != shares.bf16 else ""
        fp16 = f", {shares.fp16:.2f} with sums in float16" if shares.fp16 != shares.bf16 else ""
        return f"estimated: {shares.bf16:.2f} of {of}{fp8}{fp16}"

    def times(self, work: Work) -> dict[str, float]:
        """Seconds by kind of work.

        Products of experts, attention and the delta rule reach fixed shares of the rates.
        """
        rates, measured = self.rates, self.measured is not None
        bf16, fp8, bandwidth = 1e12 * rates.bf16, 1e12 * (rates.fp8 or rates.bf16), TRAFFIC * self.bandwidth
        of_bf16, of_fp16 = (MATMUL_MEASURED,) * 2 if measured else (self.shares.bf16, self.shares.fp16)
        half = work.half_attention, work.half_attention_backward
        wide = work.attention - half[0], work.attention_backward - half[1]
        more = 1 + work.edges / ((work.attention + work.attention_backward) or 1.0)
        half_attention, attention = more * _as_products(*half, of_fp16), more * _as_products(*wide, of_bf16)
        delta_rule = of_bf16 * (work.delta_rule / DELTA_RULE_FORWARD + work.delta_rule_backward / DELTA_RULE_BACKWARD)
        return {
            "matmul": (work.matmul - work.half) / bf16,
            "half": (work.half + half_attention) / (1e12 * rates.fp16),
            "fp8": (work.fp8 + work.grouped_fp8 / GROUPED) / fp8,
            "grouped": work.grouped / GROUPED / bf16,
            "attention": attention / bf16,
            "delta rule": delta_rule / bf16,
            "elementwise": work.traffic / bandwidth,
            "quantization": work.quantization / min(bandwidth, QUANTIZATION),
            "adapters": work.low_rank / min(bandwidth, LOW_RANK),
        }

    def seconds(self, work: Work) -> float:
        """The time of one pass over a layer."""
        return max(sum(self.times(work).values()), LAUNCH)


def _as_products(forward: float, backward: float, share: float) -> float:
    """The operations of products at `share` of the peak that take as long as these operations of attention."""
    return share * (forward / ATTENTION_FORWARD + backward / ATTENTION_BACKWARD)


HOPPER = Shares(bf16=0.70, fp16=0.70, fp8=0.63)  # power limits them
CARDS = {
    "rtx3090": Card("RTX 3090", 24 * GIB, Rates(71, 142), 936 * GB, 25 * GB, Shares(bf16=1.03)),
    "rtx4090": Card("RTX 4090", 24 * GIB, Rates(165, 330, 330), 1008 * GB, 25 * GB, Shares(bf16=0.96, fp8=0.86)),
    "rtx5090": Card("RTX 5090", 32 * GIB, Rates(209, 419, 419), 1792 * GB, 50 * GB, Shares(bf16=1.08)),
    "l40s": Card("L40S", 48 * GIB, Rates(362, 362, 733), 864 * GB, 25 * GB),
    "a100": Card("A100", 80 * GIB, Rates(312, 312), 2039 * GB, 25 * GB),
    "a800": Card("A800", 80 * GIB, Rates(312, 312), 2039 * GB, 25 * GB),
    "h100": Card("H100", 80 * GIB, Rates(989, 989, 1979), 3350 * GB, 51 * GB, HOPPER),
    "h200": Card("H200", 140 * GIB, Rates(989, 989, 1979), 4800 * GB, 51 * GB, HOPPER),
}
# A CPU worker: proportions of layers matter, times do not.
CPU = Card("CPU", 0, Rates(0.05, 0.05), 10 * GB, 10 * GB)


@dataclass(frozen=True)
class Machine:
    """N devices of one kind, and what limits the optimizer: its threads, and the bandwidth of host memory."""

    card: Card
    devices: int
    host_bandwidth: float = 100 * GB  # bytes per second
    threads: int = 26  # of the optimizer: of 32 cores
    pcie_total: float | None = None  # bytes per second each way of all devices together, if they share a link
    links_measured: str | None = None  # ISO date
    network: float | None = None  # bytes per second each way to other machines; None: messages take no time

    @property
    def link(self) -> float:
        """Bytes per second in each direction for a device while all devices copy."""
        return min(self.card.pcie, (self.pcie_total or float("inf")) / self.devices)

    def network_seconds(self, nbytes: float) -> float:
        """Seconds in which this many bytes are sent, and as many received."""
        return 0.0 if self.network is None else nbytes / (GOODPUT * self.network)

    def update_seconds(self, parameters: int, nbytes: float, thread_rate: float = inf) -> float:
        """Seconds of an optimizer step that reads and writes `nbytes` bytes per parameter.

        `thread_rate`: the parameters per second that a thread can update.
        """
        return parameters * max(nbytes / self.host_bandwidth, 1 / (thread_rate * self.threads))


def card_named(device: str) -> Card | None:
    """The profile whose name is in a driver's device name ("NVIDIA GeForce RTX 4090"); None if there is none.

    A laptop GPU is a different chip from the card of its name.
    """
    name = device.lower()
    if "laptop" in name:
        return None
    return next((card for card in CARDS.values() if card.name.lower() in name), None)


def is_named_after(device: str, card: Card) -> bool:
    """Whether a driver's device name is the card's name, without another word such as "40GB" or "Ti"."""
    words = [word for word in device.lower().split() if word not in ("nvidia", "geforce")]
    return words == card.name.lower().split()


def with_rates(
    card: Card,
    *,
    vram: int | None,
    pcie: float | None,
    bf16: float | None = None,
    fp16: float | None = None,
    fp8: float | None = None,
) -> Card:
    """The card with the given figures in place of its own; the peak of `bf16` scales those that are not given."""
    peak, scale = card.peak, (bf16 or card.peak.bf16) / card.peak.bf16
    peak = Rates(bf16 or peak.bf16, fp16 or peak.fp16 * scale, fp8 or (peak.fp8 and peak.fp8 * scale))
    return replace(card, vram=vram or card.vram, pcie=pcie or card.pcie, peak=peak)
