"""Write, read and check adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from rptrain.checkpoint.atomic_dir import Aside
from rptrain.config.types import MAX_COUNT
from rptrain.models import registry
from rptrain.models.adapters.lora import ENDS, A, LoRA, target_names
from rptrain.models.adapters.names import expert_parameters
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.weights import pretrained, safetensors_io
from rptrain.models.weights.pretrained import TIED_HEAD, View
from rptrain.models.weights.safetensors_io import Stored
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded
from rptrain.utils.text import one_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT puts it before the names of the model's own checkpoint
SHOWN = 10  # problems of each kind that an error lists

# Options of PEFT that are not supported here. An empty or false value means that the option is not used.
_INITS = ("gaussian", "eva")  # ways to initialize an adapter that do not change its base
_OTHER = (
    *("fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("trainable_token_indices", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "velora_config", "monteclora_config"),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """An adapter without its weights: its settings and the name of its base model."""

    settings: LoRA
    base: str

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`, for the `lora` of a checkpoint's meta."""
        stored = {name: tuple(v) if isinstance(v, list) else v for name, v in meta["settings"].items()}
        values: dict[str, Any] = {key: stored[name] for key, name in _stored_names().items() if name in stored}
        return cls(LoRA(**values), meta["base"])

    def to_dict(self) -> dict[str, Any]:
        settings = asdict(self.settings)
        return {"settings": {name: settings[key] for key, name in _stored_names().items()}, "base": self.base}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The content of adapter_config.json."""
        settings = self.settings
        saved = saved_modules(spec)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "inference_mode": True,
            "r": settings.r,
            "lora_alpha": settings.lora_alpha,
            "lora_dropout": settings.lora_dropout,
            "target_modules": target_names(spec),
            "use_rslora": settings.use_rslora,
            "use_dora": settings.use_dora,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": saved or None,
        }
        if settings.target_parameters:
            config["target_parameters"] = list(settings.target_parameters)
        return config | ({"ensure_weight_tying": True} if _ties(spec) else {})


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter on disk: adapter_config.json, and the stored tensors by name."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]


def base_name(model_path: str, model_dir: Path) -> str:
    """The name of the base model in an adapter: its absolute path, or its name on the hub."""
    return str(model_dir.absolute()) if expanded(model_path).is_dir() else model_path


def saved_modules(spec: ModelSpec) -> list[str]:
    """The full names of the modules that are trained in full."""
    keys = [key for key in shapes(spec) if ".lora_" not in key and not (spec.tied and key == TIED_HEAD)]
    return list(dict.fromkeys(key.rpartition(".")[0] for key in keys))


def shapes(spec: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shapes of all trained tensors, by their names in the model's checkpoint.

    For a tied embedding PEFT stores the head too.
    """
    found = {
        part.key: (part.rows, *param.shape[1:])
        for unit in spec.units
        if unit.trainable
        for param in unit.params
        for part in param.parts
    }
    return found | ({TIED_HEAD: spec.units[0].params[0].shape} if _ties(spec) else {})


def write(aside: Aside, spec: ModelSpec, view: View, adapter: Adapter, dtype: torch.dtype) -> None:
    """Writes both files, with one unit in memory at a time."""
    own = (
        rows
        for index, unit in enumerate(spec.units)
        if unit.trainable
        for param in unit.params
        for rows in view(index, param.name).split([part.rows for part in param.parts])
    )
    named = {PREFIX + key: shape for key, shape in shapes(spec).items()}
    again = (view(0, param.name) for param in spec.units[0].params if _ties(spec))
    safetensors_io.write(aside.path / WEIGHTS, named, dtype, chain(own, again))
    aside.write_json(CONFIG, adapter.config(spec))


def read(directory: str | Path) -> AdapterFiles:
    """The adapter in a directory. UserError if it is not an adapter, or of a kind that is not supported."""
    directory = expanded(directory)
    if not (directory / CONFIG).is_file():
        raise UserError(f"{directory} is not an adapter: it has no {CONFIG}")
    config = registry.read_config(directory / CONFIG)
    if config.get("peft_type") != "LORA":
        raise UserError(f'{directory / CONFIG}: peft_type is {config.get("peft_type")!r}; only "LORA" can be read')
    used = [key for key in _OTHER if config.get(key)]
    if config.get("bias", "none") != "none":
        used.append("bias")
    if config.get("init_lora_weights", True) not in (True, False, *_INITS):  # PEFT would change the base on loading
        used.append(f"init_lora_weights {config['init_lora_weights']!r}")
    if used:
        raise UserError(f"{directory / CONFIG}: {', '.join(used)} cannot be trained here")
    if not isinstance(config.get("base_model_name_or_path"), str | None):
        raise UserError(f"{directory / CONFIG}: base_model_name_or_path must be text")
    if not (directory / WEIGHTS).is_file():
        pickled = "; pickled weights are not read" if any(directory.glob("*.bin")) else ""
        raise UserError(f"{directory} is not a complete adapter: it has no {WEIGHTS}{pickled}")
    return AdapterFiles(directory, config, safetensors_io.read_header(directory / WEIGHTS))


def settings_of(files: AdapterFiles, spec: ModelSpec) -> LoRA:
    """The settings of an adapter, from its tensors and its config. `spec` is its base model.

    UserError if values of the config are invalid.
    """
    config = files.config
    own = [name.removeprefix(PREFIX) for name in files.tensors if not (spec.tied and name == PREFIX + TIED_HEAD)]
    names = dict.fromkeys(name.removesuffix(A) for name in own if name.endswith(A))
    experts = {name.rpartition(".")[0] for name in expert_parameters(spec)}
    targets = tuple(name for name in names if name.removesuffix(".base_layer") not in experts)
    saved = tuple(dict.fromkeys(name.rpartition(".")[0] for name in own if not name.endswith(ENDS)))
    r, alpha, parameters = config.get("r", 8), config.get("lora_alpha", 8), config.get("target_parameters") or []
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not isinstance(r, int) or not number or not abs(alpha) <= MAX_COUNT:  # false for NaN too
        raise UserError(
            f"{files.directory / CONFIG}: r must be a whole number and lora_alpha a number, at most {MAX_COUNT}"
        )
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise UserError(f"{files.directory / CONFIG}: target_parameters must be a list of names")
    flags = {key: config.get(key) or False for key in ("use_rslora", "use_dora")}
    if wrong := [key for key, value in flags.items() if not isinstance(value, bool)]:
        raise UserError(f"{files.directory / CONFIG}: {wrong[0]} must be true or false")
    kind: dict[str, Any] = {"target_parameters": tuple(parameters), **flags}
    return LoRA(r=r, lora_alpha=alpha, target_modules=targets, modules_to_save=saved, **kind)


def check(files: AdapterFiles, spec: ModelSpec) -> None:
    """UserError that lists how the tensors differ from those of the model's adapter: missing, unexpected, shapes."""
    wanted = {PREFIX + key: shape for key, shape in shapes(spec).items()}
    stored = files.tensors
    missing = [f"{name} is missing" for name in wanted if name not in stored]
    extra = [f"{name} is not part of it" for name in stored if name not in wanted]
    other = [
        f"{name} has no elements"
        if not prod(stored[name].shape)
        else f"{name} has shape {list(stored[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    if problems := [line for kind in (missing, extra, other) for line in _shortened(kind)]:
        raise UserError(
            f"the adapter in {files.directory} does not match this model and these settings:\n- "
            + "\n- ".join(problems)
        )


def check_settings(files: AdapterFiles, settings: LoRA, base: str) -> None:
    """UserError if the adapter has other settings, so that a run with these could not continue training it. Logs a
    warning if its base model has another name.
    """
    defaults = asdict(LoRA())
    differ = [
        f"lora.{key} is {_shown(getattr(settings, key))}, the adapter's is {_shown(found)}"
        for key in ("r", "lora_alpha", "use_rslora", "use_dora")
        if (found := files.config.get(key, defaults[key])) != getattr(settings, key)
    ]
    if differ:
        raise UserError(f"{files.directory} has other settings: {'; '.join(differ)}. Set them to the same values")
    named = files.config.get("base_model_name_or_path")
    if named and Path(named).name != Path(base).name:
        names = (one_line(str(name)) for name in (files.directory, named, base))
        log.warning("the adapter in %s was trained on %s, and continues with %s", *names)


def load(files: AdapterFiles, spec: ModelSpec, view: View) -> None:
    """Loads all trained tensors into their views and converts them to their dtype. Call `check` first."""
    pairs = []
    for index, unit in enumerate(spec.units):
        for param in unit.params if unit.trainable else ():
            rows = view(index, param.name).split([part.rows for part in param.parts])
            pairs += [(files.tensors[PREFIX + part.key], piece) for part, piece in zip(param.parts, rows, strict=True)]
    safetensors_io.read(pairs)
    trained = [index for index, unit in enumerate(spec.units) if unit.trainable]
    if name := pretrained.not_finite(spec, view, trained):
        raise UserError(f"{files.directory / WEIGHTS}: {name} has values that are infinite or not numbers")


def _stored_names() -> dict[str, str]:
    """The names of the settings, with their names in a checkpoint, where three are shorter."""
    short = {"lora_alpha": "alpha", "lora_dropout": "dropout", "use_rslora": "rslora"}
    return {field.name: short.get(field.name, field.name) for field in fields(LoRA)}


def _ties(spec: ModelShape) -> bool:
    """Whether the embedding is trained and tied to the head."""
    return spec.tied and spec.units[0].trainable


def _shortened(lines: list[str]) -> list[str]:
    return lines[:SHOWN] + ([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])


def _shown(value: object) -> str:
    return json.dumps(value)
