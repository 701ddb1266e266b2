"""The estimated speed of a config with the other type of products that its model and its GPUs allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rptrain.config.schema import Config
from rptrain.machine.hardware import Hardware, check_fp8
from rptrain.planner.changes import with_value
from rptrain.planner.choose import RunPlan
from rptrain.planner.memory import plan_run
from rptrain.preflight.model import for_hardware, training_model
from rptrain.utils.errors import UserError

WORTH = 1.03  # times as fast at least, for a suggestion
NAMES = {
    ("engine.fp8", False): "bfloat16",
    ("engine.fp8", True): "FP8 in the blocks",
    ("engine.fp16_accumulation", False): "float16 with float32 sums",
    ("engine.fp16_accumulation", True): "float16 with float16 sums",
}


@dataclass(frozen=True)
class ProductType:
    """A type of products, the key and value that choose it, and the estimated speed of a run with it."""

    key: str
    value: bool
    seconds_per_step: float
    tokens_per_second: float

    @property
    def name(self) -> str:
        return NAMES[self.key, self.value]

    @property
    def setting(self) -> str:
        return f"{self.key} = {str(self.value).lower()}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "settings": {self.key: self.value},
            "seconds_per_step": self.seconds_per_step,
            "tokens_per_second": self.tokens_per_second,
        }


def product_types(config: Config, hardware: Hardware, run: RunPlan) -> tuple[ProductType, ...]:
    """The type of a config without "auto", whose plan is `run`, and the other type of its model, if it can be used.

    It cannot be used without GPUs that have it, if the model has no matrix for it, or if its plan does not fit. Models
    in float32 and float64 have no other type, because the rate of their products is not known. The search for the other
    plan is short and starts at `run`, so it takes less than a second, and may miss a few percent.
    """
    key = {"bfloat16": "engine.fp8", "float16": "engine.fp16_accumulation"}.get(config.model.dtype)
    if key is None or not hardware.gpus:
        return ()
    present = config.engine.fp8 or config.engine.fp16_accumulation  # of which the model's type allows one
    other = with_value(config, key, not present)
    found = None if other is None else _plan(other, hardware, run)
    if found is None:
        return ()
    return tuple(
        ProductType(key, value, period, config.tokens / period)
        for value, period in ((present, run.estimate.period), (not present, found.estimate.period))
    )


def _plan(config: Config, hardware: Hardware, near: RunPlan) -> RunPlan | None:
    """A plan that is found quickly; None if the config cannot be used."""
    if config.engine.fp8 and hardware.machine.card.rates.fp8 is None:
        return None
    try:
        if config.engine.fp8 and hardware.here:
            check_fp8(hardware.names)
        run, memory = plan_run(
            config, for_hardware(training_model(config)[1], config, hardware), hardware, near=near.plan.stages
        )
    except UserError:
        return None
    return run if memory.fits else None


def suggested(types: Sequence[ProductType]) -> ProductType | None:
    """The other type of `product_types`, if it is faster by more than the uncertainty of a short search."""
    if not types:
        return None
    present, other = types
    return other if present.seconds_per_step > WORTH * other.seconds_per_step else None
