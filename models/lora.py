"""LoRA: a model with frozen weights and, beside its products, low-rank adapters that are trained, by PEFT's names."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import sqrt

from rptrain.errors import UserError
from rptrain.models.adapters import PLACES, Adapters
from rptrain.models.attention import AttentionBlock
from rptrain.models.freeze import split_units
from rptrain.models.moe import MoEBlock
from rptrain.models.spec import Layer, ModelSpec, Param, Part, Unit

ALL = "all-linear"
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class LoRA:
    """What is adapted, and how: as PEFT's LoraConfig says it."""

    r: int = 8
    alpha: int = 8
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL  # a pattern of whole names, or names or their ends
    rslora: bool = False
    modules_to_save: tuple[str, ...] = ()  # names or their ends: trained whole

    @property
    def scale(self) -> float:
        """Of an adapter's output; rsLoRA's (Kalajdzievski 2023, arXiv 2312.03732) divides by the root of the rank."""
        return self.alpha / (sqrt(self.r) if self.rslora else self.r)


def with_lora(spec: ModelSpec, settings: LoRA) -> ModelSpec:
    """The model with a unit "layers.i.lora" of adapters behind the units of each layer that has some, the rest frozen.

    `spec` is as the registry builds it. UserError where the settings name what there is none of, or what cannot have
    an adapter.
    """
    if settings.r < 1:
        raise UserError(f"lora.r must be at least 1, not {settings.r}")
    targets = _targets(spec, settings.target_modules)
    saved = _saved(spec, settings.modules_to_save, targets)
    base = split_units(spec, lambda param: not _is_saved(param, saved))
    units, layers = list(base.units), []
    for layer, original in zip(base.layers, spec.layers, strict=True):
        params, adapters = [], []
        for param in _products(spec, original):
            if found := _adapters(param, settings, targets):
                adapters.append(found[0])
                params += found[1:]
        if params:
            layer = replace(_block(layer), units=(*layer.units, len(units)), adapters=tuple(adapters))
            units.append(Unit(f"{layer.name}.lora", tuple(params)))
        layers.append(layer)
    return replace(base, units=tuple(units), layers=tuple(layers))


def module(part: Part) -> str:
    """The name of the module that a tensor of a checkpoint belongs to."""
    return part.key.rpartition(".")[0]


def adapted(spec: ModelSpec) -> list[str]:
    """The modules that have an adapter, in order."""
    keys = [part.key for unit in spec.units for param in unit.params for part in param.parts]
    return [key.removesuffix(A) for key in keys if key.endswith(A)]


def target_names(spec: ModelSpec) -> list[str]:
    """The adapted modules as a list for PEFT: by the ends of their names where that means no other module."""
    modules = adapted(spec)
    ends = {_end(name): None for name in modules}
    return modules if any(_end(name) in ends for name in {*_modules(spec)} - {*modules}) else list(ends)


def _adapters(param: Param, settings: LoRA, targets: set[str]) -> tuple[Adapters, Param, Param] | None:
    """Those of the product with this weight, and their parameters."""
    start, found = 0, []
    for part in param.parts:
        if module(part) in targets:
            found.append((start, part))
        start += part.rows
    if not found:
        return None
    starts, parts = zip(*found, strict=True)
    widths, inputs, r = tuple(part.rows for part in parts), param.shape[1], settings.r
    made = Adapters(param.name, starts, widths, inputs, r, settings.scale, settings.dropout)
    names = [module(part) for part in parts]
    return (
        made,
        Param(made.a, (made.ranks, inputs), tuple(Part(name + A, r) for name in names), bound=inputs**-0.5),
        Param(made.b, (sum(widths), r), tuple(map(Part, (name + B for name in names), widths)), std=0.0),
    )


def _products(spec: ModelSpec, layer: Layer) -> Iterable[Param]:
    """The weights of a layer that can have adapters.

    In a model with experts these are attention's: PEFT takes all names of an MLP for those of experts.
    """
    names = PLACES[:2] if any(isinstance(layer, MoEBlock) for layer in spec.layers) else PLACES
    params = [param for unit in layer.units for param in spec.units[unit].params]
    return (param for name in names for param in params if param.name == name)


def _block(layer: Layer) -> AttentionBlock:
    assert isinstance(layer, AttentionBlock)
    return layer


def _targets(spec: ModelSpec, wanted: str | tuple[str, ...]) -> set[str]:
    """The modules that are to have an adapter."""
    able = [module(part) for layer in spec.layers for param in _products(spec, layer) for part in param.parts]
    if wanted == ALL:
        return set(able)
    others = [name for name in _modules(spec) if name not in able]
    found: set[str] = set()
    for entry in (wanted,) if isinstance(wanted, str) else wanted:
        matches = _pattern(entry) if isinstance(wanted, str) else _ending(entry)
        if refused := next(filter(matches, others), None):
            raise UserError(f"lora.target_modules: {entry!r} matches {refused}, {_why_not(refused, able)}")
        matched = set(filter(matches, able))
        if not matched and isinstance(wanted, str) and any(map(_ending(entry), able)):
            raise UserError(
                f"lora.target_modules: {entry} is a pattern of whole names; "
                f'write ["{entry}"] for the modules that end so'
            )
        if not matched:
            raise UserError(f"lora.target_modules: no module that can have an adapter matches {_hint(entry, able)}")
        found |= matched
    return found


def _saved(spec: ModelSpec, wanted: Iterable[str], targets: set[str]) -> set[str]:
    """The modules that are to be trained whole."""
    names = [name for name in _modules(spec) if ".experts" not in name]
    found: set[str] = set()
    for entry in wanted:
        if spec.tied and _ending(entry)("lm_head"):
            raise UserError(
                "lora.modules_to_save: lm_head is the embedding in this model: write embed_tokens, which trains both"
            )
        matched = set(filter(_ending(entry), names))
        if not matched:
            raise UserError(f"lora.modules_to_save: no module matches {_hint(entry, names)}")
        if both := matched & targets:
            raise UserError(
                f"lora.modules_to_save: {min(both)} has an adapter by lora.target_modules, and is to be trained whole: "
                "take it out of one of them"
            )
        found |= matched
    return found


def _is_saved(param: Param, saved: set[str]) -> bool:
    whole = [module(part) for part in param.parts if module(part) in saved]
    if whole and len(whole) < len(param.parts):
        others = ", ".join(module(part) for part in param.parts if module(part) not in saved)
        raise UserError(
            f"lora.modules_to_save: {', '.join(whole)} cannot be trained without {others}: they are one matrix here; "
            "name all of them or none"
        )
    return bool(whole)


def _modules(spec: ModelSpec) -> list[str]:
    keys = [part.key for unit in spec.units for param in unit.params for part in param.parts]
    return [key.rpartition(".")[0] for key in keys if key.endswith((".weight", ".bias"))]


def _ending(entry: str) -> Callable[[str], bool]:
    return lambda name: f".{name}".endswith(f".{entry}")


def _pattern(entry: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(entry)
    except re.error as error:
        raise UserError(f"lora.target_modules: {entry!r} is no pattern: {error}") from None
    return lambda name: compiled.fullmatch(name) is not None


def _why_not(name: str, able: list[str]) -> str:
    if ".mlp." in name:
        return f"and adapters of experts are not supported, nor of an MLP beside them; {_there_are(able)}"
    return f"which can have no adapter, but can be trained whole: name it in lora.modules_to_save; {_there_are(able)}"


def _hint(entry: str, names: list[str]) -> str:
    near = get_close_matches(entry, set(map(_end, names)), 1)
    return f"{entry!r}{f'; did you mean {near[0]!r}?' if near else ''}; {_there_are(names)}"


def _there_are(names: Iterable[str]) -> str:
    return f"there are {', '.join({_end(name): None for name in names})}"


def _end(name: str) -> str:
    return name.rpartition(".")[2]
