"""The learning rate that suits the size of a model, and a warning about one that is far below it.

The rates are usual for AdamW: fine-tuning 1e-5 from a billion parameters on and 1e-4 for adapters; more for smaller
models, as their papers do.
"""

from typing import Literal

from rptrain.config.schema import Config
from rptrain.utils.units import format_count

RATES = (  # below this number of parameters: the rate for all weights, and that for adapters
    (30e6, 1e-3, 1e-3),
    (300e6, 1e-4, 2e-4),
    (1e9, 3e-5, 2e-4),
)
LARGE = 1e-5, 1e-4  # of larger models
SMALL = 300e6  # parameters of models that a low rate hardly changes
FAR = 20  # a rate by this factor below the suitable one is too low


def suitable_rate(parameters: int, method: Literal["full", "lora"]) -> float:
    """The learning rate for all weights, or for adapters, of a model."""
    full, adapters = next(((full, adapters) for most, full, adapters in RATES if parameters < most), LARGE)
    return adapters if method == "lora" else full


def low_rate(config: Config, parameters: int) -> str:
    """A warning if a small model would hardly learn at the rate of a config; otherwise empty."""
    method = "full" if config.adapters is None else "lora"
    suits, rate = suitable_rate(parameters, method), config.optim.learning_rate
    if parameters >= SMALL or rate * FAR >= suits:
        return ""
    size = f"a model of {format_count(parameters)} parameters"
    return (
        f"optim.learning_rate {as_rate(rate)} is low for {size}, which learns little from it: about "
        f"{as_rate(suits)} suits {trained(method)} of this size"
    )


def as_rate(rate: float) -> str:
    """A learning rate in one notation for all, such as "2e-3"."""
    mantissa, exponent = f"{rate:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def trained(method: str) -> str:
    return "adapters of a model" if method == "lora" else "all weights of a model"
