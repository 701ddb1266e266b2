"""LoRA: models with frozen weights and trained low-rank adapters, with PEFT's names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt

from torch import Tensor

from rptrain.kernels.reference.dense import wide
from rptrain.models.layer import Layer
from rptrain.models.layers.adapters import Adapters
from rptrain.models.layers.attention import AttentionBlock
from rptrain.models.layers.expert_adapters import ExpertAdapters
from rptrain.models.layers.moe import MoEBlock
from rptrain.models.params import CheckpointPart, Param, Unit
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.transforms.freeze import split_units
from rptrain.models.transforms.names import (
    ALL,
    EXPERTS,
    adaptable_modules,
    adapted_modules,
    adapted_parameters,
    end,
    expert_parameter,
    is_saved,
    module,
    module_of,
    modules,
    products,
    saved_modules,
)
from rptrain.models.weights.file_backed import FileBackedUnit
from rptrain.models.weights.pretrained import Held, View
from rptrain.models.weights.quantized import rows, rows_each
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import in_parallel

A, B, MAGNITUDE = ENDS = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
UNIT = ".lora"  # suffix of the names of adapters' units


@dataclass(frozen=True)
class LoRA:
    """The settings of adapters, as in PEFT's LoraConfig."""

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL  # a pattern for whole names, or names or suffixes
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()  # names or suffixes of modules that are trained in full
    use_dora: bool = False
    target_parameters: tuple[str, ...] = ()  # parameters of MLPs in models with experts: names or suffixes

    @property
    def scale(self) -> float:
        """The factor of an adapter's output; rsLoRA (Kalajdzievski 2023, arXiv 2312.03732) divides by sqrt(rank)."""
        return self.lora_alpha / (sqrt(self.r) if self.use_rslora else self.r)


def with_lora(spec: ModelSpec, settings: LoRA) -> ModelSpec:
    """The model with a unit "layers.i.lora" after the units of each layer with adapters, and everything else frozen.

    `spec` comes from the registry. Raises UserError if the settings name modules that do not exist or cannot have an
    adapter.
    """
    if settings.r < 1:
        raise UserError(f"lora.r must be at least 1, not {settings.r}")
    if settings.use_dora and settings.lora_dropout:
        raise UserError(
            "lora.lora_dropout cannot be used with lora.use_dora: the model's own weights would have to be multiplied "
            "twice, with and without dropout; set lora.lora_dropout = 0"
        )
    if settings.target_parameters and (settings.lora_dropout or settings.use_dora):
        key, off = ("lora.use_dora", "false") if settings.use_dora else ("lora.lora_dropout", "0")
        raise UserError(
            f"{key} cannot be used with lora.target_parameters (PEFT does not support it): set {key} = {off}"
        )
    targets = adapted_modules(spec, settings.target_modules)
    parameters = adapted_parameters(spec, settings.target_parameters)
    targets |= set(map(module_of, parameters))
    if not targets:
        raise UserError(
            "lora.target_modules and lora.target_parameters match nothing that can have an adapter: "
            'set lora.target_modules = "all-linear"'
        )
    saved = saved_modules(spec, settings.modules_to_save, targets)
    base = split_units(spec, lambda param: not is_saved(param, saved))
    units, layers = list(base.units), []
    for layer, original in zip(base.layers, spec.layers, strict=True):
        params, adapters = [], []
        for param in products(spec, original):
            if found := _adapters(param, settings, targets):
                adapters.append(found[0])
                params += found[1]
        for found in _expert_adapters(spec, original, settings, parameters):
            adapters.append(found[0])
            params += found[1]
        if params:
            layer = replace(_block(layer), units=(*layer.units, len(units)), adapters=tuple(adapters))
            units.append(Unit(layer.name + UNIT, tuple(params)))
        layers.append(layer)
    return replace(base, units=tuple(units), layers=tuple(layers))


def adapter_units(spec: ModelShape) -> range:
    """The units of adapters, which are the last ones."""
    count = sum(unit.name.endswith(UNIT) for unit in spec.units)
    return range(len(spec.units) - count, len(spec.units))


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """The units and layers of the model itself, at their indices, as in its checkpoints."""
    layers = [
        replace(_block(layer), units=layer.units[:-1], adapters=()) if _block(layer).adapters else layer
        for layer in spec.layers
    ]
    return replace(spec, units=spec.units[: adapter_units(spec).start], layers=tuple(layers))


def set_magnitudes(spec: ModelSpec, held: Held, file_backed: Mapping[int, FileBackedUnit]) -> None:
    """Sets DoRA's magnitudes to the norms of the rows that they scale, as PEFT does. Other weights must be loaded.

    Threads dequantize some rows at a time, or read them if the unit is file-backed, within quantized.QUANTIZING.
    """

    def begin(item: tuple[Layer, Adapters]) -> None:
        layer, adapters = item
        *own, last = layer.units
        params = {name: tensor for name in adapters.params if isinstance(tensor := held(last, name), Tensor)}
        magnitudes = params[adapters.magnitude]
        unit = next(unit for unit in own for param in spec.units[unit].params if param.name == adapters.name)
        weight = None if unit in file_backed else held(unit, adapters.name)

        def some(start: int, stop: int) -> Tensor:
            if weight is None:
                return file_backed[unit].rows(adapters.name, start, stop)
            return rows(weight, adapters.inputs, start, stop, magnitudes.dtype)

        magnitudes.copy_(adapters.norms_by_rows(params, some, rows_each(weight, adapters.inputs)))

    in_parallel(
        begin,
        [(layer, a) for layer in spec.layers for a in _block(layer).adapters if isinstance(a, Adapters) and a.dora],
    )


def merged(spec: ModelSpec, view: View) -> View:
    """The weights of `without_adapters`: those of `view` with their adapters merged, rounded once.

    Parameters are computed one at a time in the wide dtype.
    """
    places = {
        (unit, adapters.name): (layer.units[-1], adapters)
        for layer in map(_block, spec.layers)
        for adapters in layer.adapters
        for unit in layer.units
    }

    @lru_cache(maxsize=1)
    def parameter(unit: int, name: str) -> Tensor:
        weight = view(unit, name)
        if (unit, name) not in places:
            return weight
        adapter_unit, adapters = places[unit, name]
        dtype = wide(weight.dtype)
        total = weight.to(dtype, copy=True)
        adapters.merge({name: view(adapter_unit, name).to(dtype) for name in adapters.params}, total)
        return total

    return parameter


def adapted(spec: ModelSpec) -> list[str]:
    """The modules with an adapter, in order; without experts, whose weights are not modules."""
    keys = [part.key for unit in spec.units for param in unit.params for part in param.parts]
    known = {*modules(spec)}
    return [name for key in keys if key.endswith(A) and (name := key.removesuffix(A)) in known]


def target_names(spec: ModelSpec) -> list[str]:
    """The `target_modules` as a list for PEFT, by suffixes of the modules' names if these match no other module."""
    able = {*adaptable_modules(spec)}
    names = [name for name in adapted(spec) if name in able]
    if spec.stored_prefixes:  # other parts of the model may have modules of these names
        return names
    ends = {end(name): None for name in names}
    return names if any(end(name) in ends for name in {*modules(spec)} - {*names}) else list(ends)


def _adapters(param: Param, settings: LoRA, targets: set[str]) -> tuple[Adapters, list[Param]] | None:
    """The adapters of the product with this weight, and their parameters."""
    start, found = 0, []
    for part in param.parts:
        if module(part) in targets:
            found.append((start, part))
        start += part.rows
    if not found:
        return None
    starts, parts = zip(*found, strict=True)
    (outputs, inputs), r = param.shape, settings.r
    widths, names = tuple(part.rows for part in parts), [module(part) for part in parts]
    form = (settings.scale, settings.lora_dropout, settings.use_dora)
    made = Adapters(param.name, outputs, starts, widths, inputs, r, *form)

    def stacked(end: str) -> tuple[CheckpointPart, ...]:
        return tuple(map(CheckpointPart, (name + end for name in names), widths))

    params = [
        Param(made.a, (made.ranks, inputs), tuple(CheckpointPart(name + A, r) for name in names), bound=inputs**-0.5),
        Param(made.b, (sum(widths), r), stacked(B), std=0.0),
    ]
    if made.dora:
        params.append(Param(made.magnitude, (sum(widths),), stacked(MAGNITUDE), decay=False, std=None))
    return made, params


def _expert_adapters(
    spec: ModelSpec, layer: Layer, settings: LoRA, targets: set[str]
) -> list[tuple[ExpertAdapters, list[Param]]]:
    """The adapters of a layer's experts, and their parameters.

    PEFT wraps the module once for each parameter, so the names of all but the last contain another wrapper.
    """
    params = {param.name: param for unit in layer.units for param in spec.units[unit].params}
    names = [name for name in EXPERTS if name in params and expert_parameter(params[name]) in targets]
    found = []
    for number, name in enumerate(names):
        assert isinstance(layer, MoEBlock)
        width, r = layer.intermediate, settings.r
        inputs, outputs = (layer.hidden, 2 * width) if name == EXPERTS[0] else (width, layer.hidden)
        made = ExpertAdapters(name, layer.experts, layer.active, inputs, outputs, r, settings.scale)
        at = expert_parameter(params[name]).rpartition(".")[0] + ".base_layer" * (len(names) - 1 - number)
        ranks = layer.experts * r
        low = Param(made.a, (ranks, inputs), (CheckpointPart(at + A, ranks),), bound=inputs**-0.5)
        high = Param(made.b, (outputs, ranks), (CheckpointPart(at + B, outputs),), std=0.0)
        found.append((made, [low, high]))
    return found


def _block(layer: Layer) -> AttentionBlock:
    assert isinstance(layer, AttentionBlock)
    return layer
