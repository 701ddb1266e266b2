"""Changes of a config that save memory, and what each of them costs in learning or speed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rptrain.config.schema import Config
from rptrain.config.types import format_size
from rptrain.planner.memory import Kind

LIMITS: dict[str, Kind] = {"engine.host_limit": "host memory", "engine.vram_limit": "GPU memory"}
# From those that cost least: changes that keep all results, of the optimizer, of what is learned, of the data
ORDER = (
    *("engine.host_limit", "engine.vram_limit", "save.save_total_limit"),
    *("train.micro_batch_size", "engine.round_size", "engine.replicas"),
    *("optim.moments", "optim.update", "train.global_batch_size"),
    *("train.method", "lora.base", "model.hold", "data.max_length"),
)
OVERLONG = {
    "truncate": "longer samples are truncated",
    "split": "longer samples are split",
    "drop": "longer samples are dropped",
    "error": "a longer sample stops the run",
}


@dataclass(frozen=True)
class Change:
    """A new value for a key."""

    key: str
    value: Any

    def __str__(self) -> str:
        """The override, as it is given to a command."""
        return f"{self.key}={format_size(self.value) if self.key in LIMITS else self.value}"

    def cost(self, config: Config) -> str:
        """What the change costs the config, in a few words."""
        match self.key:
            case "train.global_batch_size":
                return f"{config.train.global_batch_size / self.value:.3g} times fewer sequences per step"
            case "save.save_total_limit":
                return f"only {self.value} checkpoint{'s are' if self.value > 1 else ' is'} kept"
            case "optim.moments":
                bits = {"bf16": 16, "int8": 8}[self.value]
                return f"optimizer state rounded to {bits} bits"
            case "lora.base":
                return "frozen weights are not quantized" if self.value == "bf16" else "frozen weights in 4 bits"
            case "data.max_length":
                return OVERLONG[config.data.overlong]
        return {
            "engine.host_limit": "a higher limit",
            "engine.vram_limit": "a higher limit",
            "train.micro_batch_size": "same up to rounding, smaller products",
            "engine.round_size": "same up to rounding, weights are uploaded once per round",
            "engine.replicas": "same up to rounding, fewer groups of GPUs",
            "optim.update": "exact updates, GPUs wait for the optimizer",
            "train.method": "trains adapters instead of all weights",
            "model.hold": "every step reads frozen weights from the disk",
        }[self.key]


Changes = tuple[Change, ...]


def in_order(changes: Iterable[Change]) -> Changes:
    """The changes, those that cost least first."""
    return tuple(sorted(changes, key=lambda change: ORDER.index(change.key)))


def with_value(config: Config, key: str, value: Any) -> Config | None:
    """The config with one key changed; None if the value is not valid."""
    return with_changes(config, (Change(key, value),))


def with_changes(config: Config, changes: Iterable[Change]) -> Config | None:
    """The config with these changes; None if it is not valid with them."""
    values = config.model_dump()
    for change in changes:
        section, name = change.key.split(".")
        values[section] = {**(values[section] or {}), name: change.value}
    try:
        return Config.model_validate(values)
    except ValidationError:
        return None
