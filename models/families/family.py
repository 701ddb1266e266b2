"""What the registry knows of a family of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rptrain.models.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """Models of one class in transformers. `build` makes one from its config.json, or raises UserError with every
    setting that is not supported.
    """

    architecture: str  # in `architectures` of config.json
    model_type: str
    build: Callable[[Mapping[str, Any]], ModelSpec]
    has_experts: bool = False  # see ModelShape
    mlp_modules: bool = False  # see ModelShape
