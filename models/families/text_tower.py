"""Models with a text model and other parts, such as a vision tower. Only the text model is trained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rptrain.models.params import Param
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError

# Settings of the whole model that hold for its text model, unless that has its own.
SHARED = ("dtype", "torch_dtype", "quantization_config")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # hold only for a text model that is used alone


@dataclass(frozen=True)
class TextTower:
    """An architecture whose config.json describes its text model in `text_config`."""

    architecture: str
    model_type: str
    text_types: tuple[str, ...]  # model_type of the possible text models; the first one is the default
    # Prefixes of the text model's tensors: those of the text model alone, of modules, and in checkpoints. The last two
    # may be used in checkpoints; exports have the last ones.
    prefixes: tuple[tuple[str, str, str], ...]
    carried: tuple[str, ...]  # patterns of the tensors of other parts
    tied: bool = True  # whether the embedding is the head if config.json does not say

    def text_config(self, config: Mapping[str, Any], *, alone: bool = False) -> dict[str, Any]:
        """The config.json of the text model, as part of the whole model or alone. Raises UserError if it is not a text
        model of this architecture.

        Whether the embedding is the head is what the whole config says, as in transformers.
        """
        nested = config.get("text_config")
        if not isinstance(nested, Mapping):
            raise UserError(f"config.json: text_config must be a JSON object: it describes the text model of {self}")
        kind = nested.get("model_type") or self.text_types[0]
        if kind not in self.text_types:
            known = ", ".join(self.text_types)
            raise UserError(f"config.json: text_config.model_type {kind!r} is not supported in {self}; {known} are")
        keys = (*SHARED, *TOKENS) if alone else SHARED
        shared = {key: config[key] for key in keys if nested.get(key) is None and config.get(key) is not None}
        own = {key: value for key, value in nested.items() if key != "architectures"}
        tied = config.get("tie_word_embeddings", self.tied)
        return {**own, **shared, "tie_word_embeddings": tied, "model_type": kind}

    def wrap(self, text: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
        """The text model with the names that its tensors have in the whole model of this config.json."""
        units = tuple(replace(unit, params=tuple(self._renamed(param) for param in unit.params)) for unit in text.units)
        return replace(
            text,
            architecture=self.architecture,
            config=config,
            units=units,
            carried=(*(self._module_name(name) for name in text.carried if name not in self.carried), *self.carried),
            stored_prefixes=tuple((module, stored) for _, module, stored in self.prefixes),
            read_prefixes=(),
        )

    def _renamed(self, param: Param) -> Param:
        parts = tuple(replace(part, key=self._module_name(part.key)) for part in param.parts)
        stack = param.stack and replace(param.stack, key=self._module_name(param.stack.key))
        return replace(param, parts=parts, stack=stack)

    def _module_name(self, name: str) -> str:
        for alone, module, _ in self.prefixes:
            if name.startswith(alone):
                return module + name.removeprefix(alone)
        return name

    def __str__(self) -> str:
        return self.architecture
