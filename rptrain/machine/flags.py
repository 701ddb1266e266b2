"""The machine for `rptrain plan`: this one, or a hypothetical one described on the command line."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rptrain.config.schema import Config
from rptrain.config.types import parse_size
from rptrain.machine import hardware
from rptrain.machine.gpus import gpu_count
from rptrain.machine.hardware import CardSource, Hardware
from rptrain.schedule.machine import CARDS, card_named, is_named_after, with_rates
from rptrain.utils.errors import UserError
from rptrain.utils.suggest import nearest
from rptrain.utils.text import quoted
from rptrain.utils.units import format_bytes

DEFAULT_CARD = "rtx4090"
MOST_GPUS = 1024


@dataclass(frozen=True)
class MachineFlags:
    """A hypothetical machine as described on the command line; all None: this machine."""

    gpus: int | None = None
    card: str | None = None
    vram: str | None = None
    pcie: str | None = None
    host: str | None = None
    tflops: float | None = None
    tflops_fp16: float | None = None
    tflops_fp8: float | None = None

    @property
    def given(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def machine(self, config: Config, measured: Sequence[str] = ()) -> Hardware:
        """The machine with the config's limits. Raises UserError for mistakes and for missing devices.

        `measured`: with measured times, the kinds of devices on which they were measured. If no card is named, a
        hypothetical machine has that kind, and so does the plan if there are no GPUs here.
        """
        if measured and {self.tflops, self.tflops_fp16, self.tflops_fp8} != {None}:
            raise UserError(
                "peaks do not change measured times: remove --timings, or --tflops, --tflops-fp16 and --tflops-fp8"
            )
        card = card_named(measured[0]) if len(measured) == 1 and self.card is None else None
        if card is not None and (self.given or not _devices_here(config)):
            if self.vram is None and not is_named_after(measured[0], card):
                raise UserError(
                    f"the run was measured on {measured[0]}, whose memory may not be the {format_bytes(card.vram)} of "
                    f"{card.name}: add --vram, or --card {_key(card.name)} if it is"
                )
            return planned_machine(replace(self, card=card.name), config, "--timings")
        if self.given:
            return planned_machine(self, config, "assumed" if self.card is None else "--card")
        try:
            return hardware.here(config.engine)
        except UserError as error:
            other = f"`rptrain plan … engine.devices=auto --gpus 8 --card {DEFAULT_CARD}` plans for another machine"
            raise UserError(f"{error}; {other}") from None


def _devices_here(config: Config) -> bool:
    """Whether the config names devices of this machine: CPU workers, or GPUs if there are any."""
    return config.engine.devices.startswith("cpu") or gpu_count() > 0


def _key(name: str) -> str:
    """The key of a card's name in `CARDS`."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def planned_machine(flags: MachineFlags, config: Config, card_source: CardSource) -> Hardware:
    """The machine that the flags describe, with the card's figures as defaults. Raises UserError with all mistakes.

    Without a card in the flags, it has DEFAULT_CARD.
    """
    mistakes = []
    if flags.gpus is not None and not 1 <= flags.gpus <= MOST_GPUS:
        mistakes.append(f"--gpus must be from 1 to {MOST_GPUS}, not {flags.gpus}")
    named = config.engine.devices
    if named.startswith("cpu"):
        mistakes.append(f'engine.devices = "{named}" is workers on the CPU: engine.devices=auto plans for GPUs')
    elif named.startswith("cuda:") and flags.gpus not in (None, count := len(named.split(","))):
        mistakes.append(
            f'--gpus {flags.gpus} is not the {count} of engine.devices = "{named}": leave it out, or add '
            "engine.devices=auto"
        )
    for flag, rate, example in (
        ("tflops", flags.tflops, 165),
        ("tflops-fp16", flags.tflops_fp16, 330),
        ("tflops-fp8", flags.tflops_fp8, 330),
    ):
        if rate is not None and not 1e-6 <= rate <= 1e6:
            mistakes.append(f"--{flag} must be a number such as {example}, not {rate:g}")
    name = _key(DEFAULT_CARD if flags.card is None else flags.card)
    if name not in CARDS:
        near = nearest(name, CARDS, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        mistakes.append(f"--card must be one of {', '.join(CARDS)}, not {quoted(repr(flags.card))}{hint}")

    def size(flag: str, text: str | None, example: str) -> int | None:
        try:
            found = parse_size(text)
        except ValueError:
            found = 0
        assert found is None or isinstance(found, int)
        if found == 0 or (flag == "pcie" and text is not None and text[-1:] not in "Bb"):  # 25G/s could be bits
            mistakes.append(f"--{flag} must be a size such as {example}, not {text!r}")
        return found

    vram, host = size("vram", flags.vram, "24GiB"), size("host", flags.host, "800GiB")
    pcie = size("pcie", flags.pcie and flags.pcie.strip().removesuffix("/s"), "25GB/s")
    if mistakes:
        raise UserError("\n".join(mistakes))
    rates = {"bf16": flags.tflops, "fp16": flags.tflops_fp16, "fp8": flags.tflops_fp8}
    card = with_rates(CARDS[name], vram=vram, pcie=pcie, **rates)
    source = None if vram is None else "--vram"
    return hardware.planned(card, flags.gpus, host, config.engine, vram_source=source, card_source=card_source)
