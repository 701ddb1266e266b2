"""Machines as values: cards, their rates and links, so that plans can be made for hypothetical machines."""

from dataclasses import dataclass, replace

from rptrain.schedule.costs import Work

GB, GIB = 10**9, 2**30

# The fractions of a card's peak that kernels reach, measured on an H200 with torch 2.11 (matrix products 0.80, grouped
# 0.61, attention forward and backward together 0.4 to 0.5, copies 0.85), and used for the other cards too.
MATMUL, GROUPED, ATTENTION, TRAFFIC = 0.80, 0.61, 0.45, 0.85
HOPPER_FP8 = 0.62  # the fraction of the peak that FP8 products reach there, which add their sums in float32
LAUNCH = 0.2e-3  # minimum seconds of a pass over a layer: its kernel launches
ADAM_BYTES = 12  # bytes of memory traffic per parameter: gradient 2, remainder 4, weight 2 read and 4 written


@dataclass(frozen=True)
class Card:
    """A GPU with the figures of its data sheet; `pcie` is the achieved copy rate in one direction."""

    name: str
    vram: int  # bytes
    tflops: float  # 1e12 operations per second, dense bfloat16 products accumulated in float32
    bandwidth: float  # bytes per second of its own memory
    pcie: float  # bytes per second
    fp8: float | None = None  # 1e12 operations per second, dense FP8 products accumulated in float32; None: has none
    fp8_fraction: float = MATMUL  # of that peak, which kernels reach

    def seconds(self, work: Work) -> float:
        """The time of one pass over a layer."""
        rate, fp8 = self.tflops * 1e12, (self.fp8 or self.tflops) * 1e12
        products = (work.matmul / MATMUL + work.grouped / GROUPED + work.attention / ATTENTION) / rate
        products += (work.fp8 + work.grouped_fp8 * MATMUL / GROUPED) / (self.fp8_fraction * fp8)
        return max(products + (work.traffic + work.quantization) / (TRAFFIC * self.bandwidth), LAUNCH)


CARDS = {
    "rtx3090": Card("RTX 3090", 24 * GIB, 71, 936 * GB, 25 * GB),
    "rtx4090": Card("RTX 4090", 24 * GIB, 165, 1008 * GB, 25 * GB, 330),
    "rtx5090": Card("RTX 5090", 32 * GIB, 209, 1792 * GB, 50 * GB, 419),
    "l40s": Card("L40S", 48 * GIB, 362, 864 * GB, 25 * GB, 733),
    "a100": Card("A100", 80 * GIB, 312, 2039 * GB, 25 * GB),
    "a800": Card("A800", 80 * GIB, 312, 2039 * GB, 25 * GB),
    "h100": Card("H100", 80 * GIB, 989, 3350 * GB, 51 * GB, 1979, HOPPER_FP8),
    "h200": Card("H200", 140 * GIB, 989, 4800 * GB, 51 * GB, 1979, HOPPER_FP8),
}
CPU = Card("CPU", 0, 0.05, 10 * GB, 10 * GB)  # a CPU worker: proportions of layers matter, times do not


@dataclass(frozen=True)
class Machine:
    """N devices of one kind, and the bandwidth of host memory, which limits the optimizer on the CPU."""

    card: Card
    devices: int
    host_bandwidth: float = 100 * GB  # bytes per second
    pcie_total: float | None = None  # bytes per second of all devices together, if they share a link

    @property
    def link(self) -> float:
        """Bytes per second in each direction for a device while all devices copy."""
        return min(self.card.pcie, (self.pcie_total or float("inf")) / self.devices)

    def update_seconds(self, parameters: int, moments: float = 8) -> float:
        """Seconds of an optimizer step, which reads and writes `moments` bytes of moments per parameter."""
        return parameters * (ADAM_BYTES + 2 * moments) / self.host_bandwidth


def card_named(device: str) -> Card | None:
    """The profile whose name is in a driver's device name ("NVIDIA GeForce RTX 4090"); None if there is none.

    A laptop GPU is a different chip from the card of its name.
    """
    name = device.lower()
    if "laptop" in name:
        return None
    return next((card for card in CARDS.values() if card.name.lower() in name), None)


def with_rates(card: Card, *, vram: int | None, tflops: float | None, pcie: float | None) -> Card:
    """The card with the given figures in place of its own; `tflops` scales the rate of FP8, too."""
    if tflops is not None:
        card = replace(card, tflops=tflops, fp8=card.fp8 and card.fp8 * tflops / card.tflops)
    return replace(card, vram=vram or card.vram, pcie=pcie or card.pcie)
