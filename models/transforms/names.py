"""The modules and parameters that LoRA adapts or trains in full, by names as PEFT interprets them."""

import json
from collections.abc import Callable, Iterable

from rptrain.models.layers.block import Block, blocks
from rptrain.models.params import CheckpointPart, Param
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError
from rptrain.utils.patterns import InvalidPattern, full_matches
from rptrain.utils.suggest import nearest
from rptrain.utils.text import quoted

ALL = "all-linear"
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # names that PEFT takes for experts' in most classes with experts


def module(part: CheckpointPart) -> str:
    """The module of a checkpoint's tensor."""
    return module_of(part.key)


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def params_of(spec: ModelSpec, block: Block) -> dict[str, Param]:
    """The parameters of a block by name."""
    return {param.name: param for unit in block.units for param in spec.units[unit].params}


def adaptable_modules(spec: ModelSpec) -> list[str]:
    """The modules that can have an adapter by `target_modules`.

    Of the MLPs of most models with experts, these are only gates: PEFT treats the other names as experts'.
    """
    of_mlps = not spec.has_experts or spec.mlp_modules
    found = list[str]()
    for block in blocks(spec):
        params, of_mixer = params_of(spec, block), {product.name for product in block.mixer.products}
        for product in block.products:
            names = map(module, params[product.name].parts)
            found += [name for name in names if of_mlps or product.name in of_mixer or end(name) not in OF_EXPERTS]
    return found


def adaptable_parameters(spec: ModelSpec) -> dict[str, str]:
    """The parameters that can have an adapter by `target_parameters`, by the names of their tensors in checkpoints.

    In a model with experts, these are experts' parameters, and the weights of dense MLPs and shared experts that
    `target_modules` cannot name.
    """
    parts = [block.feed_forward for block in blocks(spec)] if spec.has_experts else []
    able = {*adaptable_modules(spec)}
    names = {product.name for part in parts for product in (*part.products, *part.expert_products)}
    params = [param for unit in spec.units for param in unit.params if param.name in names]
    pairs = ((param, part) for param in params for part in param.parts if module(part) not in able)
    return {part.key: param.stack.key if param.stack else part.key for param, part in pairs}


def corrected_routers(spec: ModelSpec) -> set[str]:
    """The routers with a correction bias. PEFT would save it, too, which adapters leave out."""
    routers = ((block, block.feed_forward.router) for block in blocks(spec))
    corrected = (block for block, router in routers if router is not None and router.scoring.sigmoid)
    return {module(part) for block in corrected for part in params_of(spec, block)["router"].parts}


def adapted_modules(spec: ModelSpec, wanted: str | tuple[str, ...]) -> set[str]:
    """The modules that get an adapter by `target_modules`."""
    able = adaptable_modules(spec)
    if wanted == ALL:
        return set(able)
    if ALL in wanted and not isinstance(wanted, str):
        raise UserError(f'lora.target_modules: "{ALL}" cannot be in a list: write target_modules = "{ALL}"')
    others = [name for name in modules(spec) if name not in able and not (spec.mlp_modules and ".experts." in name)]
    found: set[str] = set()
    for entry in (wanted,) if isinstance(wanted, str) else wanted:
        matches = _pattern(entry, [*others, *able]) if isinstance(wanted, str) else _ending(entry)
        if refused := list(filter(matches, others)):
            raise UserError(f"lora.target_modules: {entry!r} matches {refused[0]}, {_why_not(spec, refused, able)}")
        matched = set(filter(matches, able))
        if not matched and spec.tied and _ending(entry)("lm_head"):
            raise UserError(
                "lora.target_modules: lm_head is tied to the embedding in this model, and neither can have an adapter: "
                'remove it, or train both in full with lora.modules_to_save = ["embed_tokens"]'
            )
        if not matched and isinstance(wanted, str) and any(map(_ending(entry), able)):
            raise UserError(
                f"lora.target_modules: {entry} is a pattern that must match whole module names; "
                f'write ["{entry}"] for the modules whose names end with it'
            )
        if not matched:
            raise UserError(f"lora.target_modules: no module that can have an adapter matches {_hint(entry, able)}")
        found |= matched
    return found


def expert_parameter(param: Param) -> str:
    """The name of experts' weights in transformers, which holds them in one tensor."""
    return param.stack.key if param.stack else param.parts[0].key


def adapted_parameters(spec: ModelSpec, wanted: Iterable[str]) -> set[str]:
    """The parameters that get an adapter by `target_parameters`, by names or suffixes."""
    parameters, found = adaptable_parameters(spec), set[str]()
    keys = (part.key for unit in spec.units for param in unit.params for part in param.parts)
    able, others = {*parameters.values()}, [key for key in keys if key not in parameters]
    for entry in wanted:
        matches, shown = _ending(entry), quoted(repr(entry))
        if not parameters:
            raise UserError(f"lora.target_parameters: {shown}: this model has no experts; use lora.target_modules")
        available = f"available: {', '.join(_in_mlp(parameters.values()))}; lora.target_modules names attention modules"
        if refused := next(filter(matches, others), None):
            raise UserError(
                f"lora.target_parameters: {shown} matches {refused}, which can have no adapter by this key; {available}"
            )
        if not (matched := set(filter(matches, able))):
            raise UserError(f"lora.target_parameters: no parameter of an MLP matches {shown}; {available}")
        found |= matched
    return found


def saved_modules(spec: ModelSpec, wanted: Iterable[str], targets: set[str]) -> set[str]:
    """The modules that are trained in full."""
    names = [name for name in modules(spec) if ".experts" not in name]
    found: set[str] = set()
    for entry in wanted:
        if spec.tied and _ending(entry)("lm_head"):
            raise UserError(
                "lora.modules_to_save: lm_head is tied to the embedding in this model: write embed_tokens to train both"
            )
        matched = set(filter(_ending(entry), names))
        if not matched:
            raise UserError(f"lora.modules_to_save: no module matches {_hint(entry, names)}")
        if refused := matched & corrected_routers(spec):
            raise UserError(
                f"lora.modules_to_save: {entry!r} matches {min(refused)}, a router with a correction bias, which "
                'cannot be trained with adapters: remove it, or use train.method = "full"'
            )
        if both := matched & targets:
            raise UserError(
                f"lora.modules_to_save: {min(both)} has an adapter by lora.target_modules or lora.target_parameters, "
                "and is also in lora.modules_to_save: remove it from one"
            )
        found |= matched
    return found


def is_saved(param: Param, saved: set[str]) -> bool:
    whole = [module(part) for part in param.parts if module(part) in saved]
    if whole and len(whole) < len(param.parts):
        others = ", ".join(module(part) for part in param.parts if module(part) not in saved)
        raise UserError(
            f"lora.modules_to_save: {', '.join(whole)} cannot be trained without {others}: they are stored as one "
            "matrix; name all of them or none"
        )
    return bool(whole)


def modules(spec: ModelSpec) -> list[str]:
    keys = [part.key for unit in spec.units for param in unit.params for part in param.parts]
    return [key.rpartition(".")[0] for key in keys if key.endswith((".weight", ".bias"))]


def _ending(entry: str) -> Callable[[str], bool]:
    return lambda name: f".{name}".endswith(f".{entry}")


def _pattern(entry: str, names: Iterable[str]) -> Callable[[str], bool]:
    try:
        return full_matches(entry, names).__contains__
    except InvalidPattern as error:
        raise UserError(f"lora.target_modules: {quoted(repr(entry))} {error}") from None


def _why_not(spec: ModelSpec, refused: list[str], able: list[str]) -> str:
    """Why the first of these modules, which are not able to, can have no adapter."""
    parameters = adaptable_parameters(spec)
    keys = [key for name in refused if (key := f"{name}.weight") in parameters]
    if keys and module_of(keys[0]) == refused[0]:
        return (
            "which can have an adapter only by lora.target_parameters = "
            f"{json.dumps(_in_mlp(parameters[key] for key in keys))}; {_there_are(able)}"
        )
    if refused[0] in corrected_routers(spec):
        return f"which can have no adapter; {_there_are(able)}"
    return f"which can have no adapter, but can be trained whole: name it in lora.modules_to_save; {_there_are(able)}"


def _in_mlp(names: Iterable[str]) -> list[str]:
    """The names of MLPs' parameters from "mlp." on, without repetitions."""
    return list(dict.fromkeys(name[name.index("mlp.") :] for name in names))


_ALL = ("all", "all_linear", "linear")  # how other trainers write "all-linear"


def _hint(entry: str, names: list[str]) -> str:
    near = ["all-linear"] if entry.lower() in _ALL else nearest(entry, {end(name): None for name in names})
    return f"{quoted(repr(entry))}{f'; did you mean {near[0]!r}?' if near else ''}; {_there_are(names)}"


def _there_are(names: Iterable[str]) -> str:
    return f"there are {', '.join({end(name): None for name in names})}"


def end(name: str) -> str:
    return name.rpartition(".")[2]
