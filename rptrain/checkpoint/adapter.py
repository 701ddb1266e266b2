"""Write, read and check adapters in the format of PEFT: adapter_model.safetensors, and adapter_config.py's file."""

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from rptrain.checkpoint import adapter_config
from rptrain.checkpoint.adapter_config import CONFIG, MERGE
from rptrain.checkpoint.atomic_dir import Aside
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.transforms.lora import ENDS, A, LoRA, target_names
from rptrain.models.transforms.names import adaptable_modules, adaptable_parameters, end, module, module_of, modules
from rptrain.models.weights import pretrained, safetensors_io
from rptrain.models.weights.pretrained import TIED_HEAD, View
from rptrain.models.weights.safetensors_io import Stored
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded
from rptrain.utils.phases import phase
from rptrain.utils.text import one_line

if TYPE_CHECKING:
    from peft import LoraConfig

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT puts it before the names of the model's own checkpoint
LAYER = re.compile(r"(.*\.layers)\.(\d+)\.(.+)")
SHOWN = 10  # problems of each kind that an error lists

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

    def config(self, spec: ModelSpec) -> "LoraConfig":
        """The settings for PEFT."""
        settings = self.settings
        return adapter_config.make(
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base,
            inference_mode=True,
            r=settings.r,
            lora_alpha=settings.lora_alpha,
            lora_dropout=settings.lora_dropout,
            target_modules=target_names(spec),
            target_parameters=list(settings.target_parameters) or None,
            use_rslora=settings.use_rslora,
            use_dora=settings.use_dora,
            modules_to_save=saved_modules(spec) or None,
            ensure_weight_tying=_ties(spec),
        )


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter on disk: adapter_config.json, and the stored tensors by name."""

    directory: Path
    config: "LoraConfig"
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


def write(
    aside: Aside,
    spec: ModelSpec,
    view: View,
    adapter: Adapter,
    dtype: torch.dtype,
    wrote: Callable[[int], object] | None = None,
) -> None:
    """Writes both files, with one unit in memory at a time. `wrote` is called with the bytes of each tensor."""
    own = (
        rows
        for index, unit in enumerate(spec.units)
        if unit.trainable
        for param in unit.params
        for rows in view(index, param.name).split([part.rows for part in param.parts])
    )
    entries = {PREFIX + key: (shape, dtype) for key, shape in shapes(spec).items()}
    again = (view(0, param.name) for param in spec.units[0].params if _ties(spec))
    safetensors_io.write(aside.path / WEIGHTS, entries, chain(own, again), wrote)
    aside.write_json(CONFIG, adapter_config.content(adapter.config(spec)))


def read(directory: str | Path) -> AdapterFiles:
    """The adapter in a directory. UserError if it is not an adapter, or of a kind that is not supported."""
    directory = expanded(directory)
    if not (directory / CONFIG).is_file():
        raise UserError(f"{directory} is not an adapter: it has no {CONFIG}")
    config = adapter_config.read(directory / CONFIG)
    if not (directory / WEIGHTS).is_file():
        pickled = "; pickled weights are not read" if any(directory.glob("*.bin")) else ""
        raise UserError(f"{directory} is not a complete adapter: it has no {WEIGHTS}{pickled}")
    tensors = safetensors_io.read_header(directory / WEIGHTS)
    safetensors_io.check_floats(tensors)
    return AdapterFiles(directory, config, tensors)


def settings_of(files: AdapterFiles, spec: ModelSpec) -> LoRA:
    """The settings of an adapter, from its tensors and its config. `spec` is its base model.

    UserError if the embedding or the head has an adapter.
    """
    config = files.config
    if problem := _at_an_end(files, spec):
        raise UserError(f"{files.directory} {problem}")
    own = [name.removeprefix(PREFIX) for name in files.tensors if not (spec.tied and name == PREFIX + TIED_HEAD)]
    names = dict.fromkeys(name.removesuffix(A) for name in own if name.endswith(A))
    parameters = {*adaptable_parameters(spec).values()}
    others = set(map(module_of, parameters))
    targets = tuple(name for name in names if name.removesuffix(".base_layer") not in others)
    weights = [weight for name in names if (weight := f"{name}.weight") in parameters]
    saved = tuple(dict.fromkeys(name.rpartition(".")[0] for name in own if not name.endswith(ENDS)))
    return LoRA(
        r=config.r,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        use_rslora=config.use_rslora,
        modules_to_save=saved,
        use_dora=config.use_dora,
        target_parameters=(*(config.target_parameters or ()), *weights),
    )


def check(files: AdapterFiles, spec: ModelSpec) -> None:
    """UserError that lists how the tensors differ from those of the model's adapter: missing, unexpected, shapes.

    `spec` has the adapter.
    """
    wanted = {PREFIX + key: shape for key, shape in shapes(spec).items()}
    stored = files.tensors
    missing = [f"{name} is missing" for name in wanted if name not in stored]
    missing += [f"{name} is missing; modules_to_save in {CONFIG} names it" for name in _lost(files, spec, wanted)]
    tied = "; the head is tied to the embedding in this model, and neither can have an adapter" if spec.tied else ""
    at_ends = tuple(f"{PREFIX}{module}.lora_" for module in ("lm_head", "model.embed_tokens"))
    extra = [
        f"{name} is not part of it{tied if name.startswith(at_ends) else ''}" for name in stored if name not in wanted
    ]
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
            + _how_to_match(files, spec, [*missing, *extra])
        )


def check_settings(files: AdapterFiles, settings: LoRA, base: str) -> None:
    """UserError if the adapter has other settings, so that a run with these could not continue training it. Logs a
    warning if its base model has another name.
    """
    differ = [
        f"lora.{key} is {_shown(getattr(settings, key))}, the adapter's is {_shown(found)}"
        for key in ("r", "lora_alpha", "use_rslora", "use_dora")
        if (found := getattr(files.config, key)) != getattr(settings, key)
    ]
    if differ:
        raise UserError(f"{files.directory} has other settings: {'; '.join(differ)}. Set them to the same values")
    if named := other_base(files, base):
        names = (one_line(str(name)) for name in (files.directory, named, base))
        log.warning("the adapter in %s was trained on %s, and continues with %s", *names)


def other_base(files: AdapterFiles, base: str) -> str:
    """The name of the base that an adapter was trained on if it differs from this one; else empty."""
    named = files.config.base_model_name_or_path
    return named if named and Path(named).name != Path(base).name else ""


def load(files: AdapterFiles, spec: ModelSpec, view: View) -> None:
    """Loads all trained tensors into their views and converts them to their dtype. Call `check` first."""
    pairs = []
    for index, unit in enumerate(spec.units):
        for param in unit.params if unit.trainable else ():
            rows = view(index, param.name).split([part.rows for part in param.parts])
            pairs += [(files.tensors[PREFIX + part.key], piece) for part, piece in zip(param.parts, rows, strict=True)]
    with phase("reading the adapter", sum(stored.nbytes for stored, _ in pairs), reads=True):
        safetensors_io.read(pairs)
    trained = [index for index, unit in enumerate(spec.units) if unit.trainable]
    if name := pretrained.not_finite(spec, view, trained):
        raise UserError(f"{files.directory / WEIGHTS}: {name} has values that are infinite or not numbers")


def _lost(files: AdapterFiles, spec: ModelShape, wanted: Collection[str]) -> list[str]:
    """The tensors that neither are there nor are wanted, of modules that the config says were trained whole."""
    entries = tuple(f".{entry}" for entry in files.config.modules_to_save or ())
    parts = (part for unit in spec.units for param in unit.params for part in param.parts)
    names = (PREFIX + part.key for part in parts if f".{module(part)}".endswith(entries))
    return [name for name in names if name not in files.tensors and name not in wanted]


def _at_an_end(files: AdapterFiles, spec: ModelShape) -> str:
    """What to do if the embedding or the head has an adapter; empty if they have none."""
    for name in (module(spec.units[0].params[0].parts[0]), module_of(TIED_HEAD)):
        if any(stored.startswith(f"{PREFIX}{name}.lora_") for stored in files.tensors):
            return f"adapts {name}, which can have no adapter here: {MERGE}"
    return ""


def _how_to_match(files: AdapterFiles, spec: ModelSpec, differing: Collection[str]) -> str:
    """A line with the modules to adapt and to save for a run that continues the adapter, if they may differ.

    `differing`: lines about tensors of one of them only.
    """
    if problem := _at_an_end(files, spec):
        return f"\nIt {problem}"
    found = settings_of(files, spec)
    names = list(found.target_modules)
    able = {*adaptable_modules(spec)}
    if not differing or not able.issuperset(names) or not {*modules(spec)}.issuperset(found.modules_to_save):
        return ""
    settings = [f"lora.target_modules = {_target(names, able)}"]
    others = {"target_parameters": files.config.target_parameters, "modules_to_save": found.modules_to_save}
    settings += [f"lora.{key} = {_shown(value)}" for key, value in others.items() if value]
    return f"\nThe adapter has {' and '.join(settings)}: set this to continue it"


def _target(names: Sequence[str], able: Collection[str]) -> str:
    """The setting for modules of these full names: suffixes if they match no others, or a pattern, or all names."""
    ends = list(dict.fromkeys(map(end, names)))
    if not any(end(name) in ends for name in {*able} - {*names}):
        return _shown(ends)
    layers = {match[2]: None for name in names if (match := LAYER.fullmatch(name))}
    kinds = {match[3]: None for name in names if (match := LAYER.fullmatch(name))}
    start = re.escape(names[0].partition(".layers.")[0])
    pattern = rf"{start}\.layers\.({'|'.join(layers)})\.({'|'.join(map(re.escape, kinds))})"
    return f"'{pattern}'" if {*filter(re.compile(pattern).fullmatch, able)} == {*names} else _shown(names)


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
