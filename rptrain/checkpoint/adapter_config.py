"""adapter_config.json: read, checked and written through `peft.LoraConfig`, whose format it is.

Importing PEFT takes about 2 s and 180 MB, so only the functions that read or write an adapter import it.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError

from rptrain.config.types import MAX_COUNT
from rptrain.models.locate import read_config
from rptrain.utils.errors import UserError
from rptrain.utils.text import clipped, one_line

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG = "adapter_config.json"
SHOWN = 60  # characters of a value in an error

_Flag = bool | None
_Names = list[str] | None


class _Read(BaseModel):
    """The settings that may have any value of these types. null, except in `r` and `lora_alpha`, is PEFT's default."""

    base_model_name_or_path: str | None = None
    r: int = Field(8, ge=1, le=MAX_COUNT)
    lora_alpha: float = Field(8, ge=-MAX_COUNT, le=MAX_COUNT, allow_inf_nan=False)
    lora_dropout: float | None = None
    use_rslora: _Flag = None
    use_dora: _Flag = None
    target_parameters: _Names = None
    # Which modules have adapters, and which are trained whole, is read from the tensors.
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    modules_to_save: _Names = None
    ensure_weight_tying: _Flag = None
    task_type: str | None = None
    inference_mode: _Flag = None


# What an adapter was made with and by. It says nothing about its result.
_IGNORED = (
    *("peft_type", "peft_version", "auto_mapping", "revision", "runtime_config", "megatron_core", "qalora_group_size"),
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
MERGE = "merge the adapter into its base with PEFT (merge_and_unload), and use the merged model"
_INITS = (True, False, None, "gaussian", "eva")  # these do not change the base
_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}  # values for some modules, and the setting for others
_MUST = {
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "list_type": "must be a list",
}


def make(**settings: Any) -> "LoraConfig":
    """The config with these settings. Raises TypeError or ValueError if PEFT does not accept them."""
    from peft import LoraConfig

    return LoraConfig(**settings)


def read(file: Path) -> "LoraConfig":
    """The content of an adapter_config.json, with the defaults of PEFT.

    UserError if it is not the config of an adapter, has invalid values, or uses what cannot be trained here. Settings
    that this version of PEFT does not know may be there if they are null, false or empty.
    """
    given = read_config(file)
    if given.get("peft_type") != "LORA":
        raise UserError(f'{file}: peft_type is {_shown(given.get("peft_type"))}; only "LORA" can be read')
    if used := _unsupported(given):
        raise UserError(f"{file}: {', '.join(used)} cannot be trained here: {MERGE}")
    try:
        _Read.model_validate(given, strict=True)
    except ValidationError as error:
        raise UserError(f"{file}: {_explained(error)}") from None
    known = {key: value for key, value in given.items() if key in _Read.model_fields and value is not None}
    try:
        return make(**known)
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: PEFT does not accept it: {one_line(str(error))}") from error


def content(config: "LoraConfig") -> dict[str, Any]:
    """What PEFT writes of a config, as JSON data. The order of names does not depend on the process."""
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}


def _unsupported(given: dict[str, Any]) -> list[str]:
    """The settings that change what an adapter computes, or may do so, in a way that does not exist here."""
    defaults = make().to_dict() | {key: _everywhere(given, key) for key in _PATTERNS}
    used = [
        one_line(key)
        for key, value in given.items()
        if value and key not in _Read.model_fields and key not in _IGNORED and value != defaults.get(key)
    ]
    init = given.get("init_lora_weights")
    return used if init in _INITS else [*used, f"init_lora_weights {_shown(init)}"]


def _everywhere(given: dict[str, Any], pattern: str) -> dict[str, Any] | None:
    """A pattern's value if it has the setting's own value for all modules that it names; None if it does not."""
    setting, value = _PATTERNS[pattern], given.get(pattern)
    own = given.get(setting, _Read.model_fields[setting].default)
    return value if isinstance(value, dict) and all(one == own for one in value.values()) else None


def _explained(error: ValidationError) -> str:
    """The first setting with an invalid value, what it must be, and what it is."""
    errors = error.errors(include_url=False)
    texts = [
        _MUST.get(found["type"], re.sub(r"^Input should", "must", found["msg"]))
        for found in errors
        if found["loc"][0] == errors[0]["loc"][0]  # one for each type that it may have
    ]
    key = ".".join(str(part) for place, part in enumerate(errors[0]["loc"]) if place == 0 or isinstance(part, int))
    return f"{key} {' or '.join(dict.fromkeys(texts))}, not {_shown(errors[0]['input'])}"


def _shown(value: object) -> str:
    return clipped(json.dumps(value), SHOWN)
