"""LoRA: models with frozen weights and trained low-rank adapters, with PEFT's names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt

from torch import Tensor

from rptrain.kernels.reference.dense import wide
from rptrain.models.layers.adapters import Adapters
from rptrain.models.layers.block import Block, blocks
from rptrain.models.layers.expert_adapters import ExpertAdapters
from rptrain.models.layers.product import Product
from rptrain.models.params import CheckpointPart, Param, Unit
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.transforms.freeze import split_units
from rptrain.models.transforms.names import (
    ALL,
    adaptable_modules,
    adapted_modules,
    adapted_parameters,
    end,
    expert_parameter,
    is_saved,
    module,
    module_of,
    modules,
    params_of,
    saved_modules,
)
from rptrain.models.weights.file_backed import FileBackedUnit
from rptrain.models.weights.pretrained import StoredView, View
from rptrain.models.weights.quantized import rows, rows_each
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import in_parallel

A, B, MAGNITUDE = ENDS = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
UNIT = ".lora"  # suffix of the names of adapters' units

Found = tuple[Adapters | ExpertAdapters, list[Param]]  # adapters of a product, and their parameters


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
    for block, original in zip(blocks(base), blocks(spec), strict=True):
        params, found = params_of(spec, original), list[Found]()
        for product in block.products:
            found += _adapters(product, params[product.name], settings, targets, layer=block.units[0])
        found += _expert_adapters(block, params, settings, parameters)
        if found:
            adapters = {made.name: made for made, _ in found}
            block = _with_adapters(replace(block, units=(*block.units, len(units))), adapters)
            units.append(Unit(block.name + UNIT, tuple(param for _, params in found for param in params)))
        layers.append(block)
    return replace(base, units=tuple(units), layers=tuple(layers))


def adapter_units(spec: ModelShape) -> range:
    """The units of adapters, which are the last ones."""
    count = sum(unit.name.endswith(UNIT) for unit in spec.units)
    return range(len(spec.units) - count, len(spec.units))


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """The units and layers of the model itself, at their indices, as in its checkpoints."""
    layers = [
        _with_adapters(replace(block, units=block.units[:-1]), {}) if block.adapters else block
        for block in blocks(spec)
    ]
    return replace(spec, units=spec.units[: adapter_units(spec).start], layers=tuple(layers))


def set_magnitudes(spec: ModelSpec, view: StoredView, file_backed: Mapping[int, FileBackedUnit]) -> None:
    """Sets DoRA's magnitudes to the norms of the rows that they scale, as PEFT does. Other weights must be loaded.

    Threads dequantize some rows at a time, or read them if the unit is file-backed, within quantized.QUANTIZING.
    """

    def begin(item: tuple[Block, Adapters]) -> None:
        block, adapters = item
        *own, last = block.units
        params = {name: tensor for name in adapters.params if isinstance(tensor := view(last, name), Tensor)}
        magnitudes = params[adapters.magnitude]
        unit = next(unit for unit in own for param in spec.units[unit].params if param.name == adapters.name)
        weight = None if unit in file_backed else view(unit, adapters.name)

        def some(start: int, stop: int) -> Tensor:
            if weight is None:
                return file_backed[unit].rows(adapters.name, start, stop)
            return rows(weight, adapters.inputs, start, stop, magnitudes.dtype)

        magnitudes.copy_(adapters.norms_by_rows(params, some, rows_each(weight, adapters.inputs)))

    in_parallel(
        begin,
        [
            (block, product.adapters)
            for block in blocks(spec)
            for product in block.products
            if product.adapters is not None and product.adapters.dora
        ],
    )


def merged(spec: ModelSpec, view: View) -> View:
    """The weights of `without_adapters`: those of `view` with their adapters merged, rounded once.

    Parameters are computed one at a time in the wide dtype.
    """
    places = {
        (unit, adapters.name): (block.units[-1], adapters)
        for block in blocks(spec)
        for adapters in block.adapters
        for unit in block.units
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


def _with_adapters(block: Block, adapters: Mapping[str, Adapters | ExpertAdapters]) -> Block:
    """The block with these adapters of products, by their names, and no others."""
    return block.with_products(lambda product: replace(product, adapters=adapters.get(product.name)))


def _adapters(product: Product, param: Param, settings: LoRA, targets: set[str], layer: int) -> list[Found]:
    """The adapters, if any, of the product with this weight, and their parameters. `layer`: see Adapters."""
    start, found = 0, []
    for part in param.parts:
        if module(part) in targets:
            found.append((start, part))
        start += part.rows
    if not found:
        return []
    starts, parts = zip(*found, strict=True)
    inputs, r = product.inputs, settings.r
    widths, names = tuple(part.rows for part in parts), [module(part) for part in parts]
    made = Adapters(
        name=product.name,
        outputs=product.outputs,
        starts=starts,
        widths=widths,
        inputs=inputs,
        rank=r,
        scale=settings.scale,
        dropout=settings.lora_dropout,
        dora=settings.use_dora,
        mask=product.mask,
        layer=layer,
    )

    def stacked(end: str) -> tuple[CheckpointPart, ...]:
        return tuple(map(CheckpointPart, (name + end for name in names), widths))

    params = [
        Param(made.a, (made.ranks, inputs), tuple(CheckpointPart(name + A, r) for name in names), bound=inputs**-0.5),
        Param(made.b, (sum(widths), r), stacked(B), std=0.0),
    ]
    if made.dora:
        params.append(Param(made.magnitude, (sum(widths),), stacked(MAGNITUDE), decay=False, std=None))
    return [(made, params)]


def _expert_adapters(block: Block, params: Mapping[str, Param], settings: LoRA, targets: set[str]) -> list[Found]:
    """The adapters of a block's experts, and their parameters.

    PEFT wraps the module once for each parameter, in the order of the products, so the names of all but the last
    contain another wrapper.
    """
    adapted = [each for each in block.expert_products if expert_parameter(params[each.name]) in targets]
    found = list[Found]()
    for number, product in enumerate(adapted):
        ranks, inputs, outputs = product.experts * settings.r, product.inputs, product.outputs
        sizes = product.experts, product.active, inputs, outputs
        made = ExpertAdapters(product.name, *sizes, settings.r, settings.scale)
        at = expert_parameter(params[product.name]).rpartition(".")[0] + ".base_layer" * (len(adapted) - 1 - number)
        low = Param(made.a, (ranks, inputs), (CheckpointPart(at + A, ranks),), bound=inputs**-0.5)
        high = Param(made.b, (outputs, ranks), (CheckpointPart(at + B, outputs),), std=0.0)
        found.append((made, [low, high]))
    return found
