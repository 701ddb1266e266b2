"""What tests of models, of the engine and of runs know of a family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]  # keys of config.json, in addition to those of the test


def _none() -> Settings:
    return {}


@dataclass(frozen=True)
class Cases:
    """The cases of a family. Sizes are those of the test that reads them, unless a case has its own."""

    # Tiny models that are compared with transformers, one for each option that changes the arithmetic. The first one
    # has the defaults; the last one of a family without experts is also compared with PEFT.
    variants: Mapping[str, Settings]
    required: Settings = field(default_factory=_none)  # without which config.json describes no model
    layers: Settings = field(default_factory=_none)  # for tests of layers
    engine: Settings | None = None  # for tests of equal bits with any plan; None: not tested
    run: Settings = field(default_factory=_none)  # for a run with its export
    spellings: Mapping[str, Settings] = field(default_factory=_none)  # older keys, and missing ones
    not_null: Sequence[str] = ()  # keys that cannot be null, beside those of every family
    refused: Sequence[tuple[Settings, str]] = ()  # with the pattern of the message
    padding: int | None = None  # the default of pad_token_id
    experts: Sequence[str] = ()  # the key of their number, and an alias of it if there is one
    apart: tuple[str, str, str] | None = None  # the names of gate, up and down if checkpoints have them by expert
    presets: Mapping[str, int] = field(default_factory=dict[str, int])  # their numbers of parameters
    slow: bool = False  # whether runs on the CPU take long


LONG_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
BOTH_KINDS = ["sliding_attention", "full_attention"]
QWEN3_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 7}
