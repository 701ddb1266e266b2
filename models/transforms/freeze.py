"""Freezing of parameters by patterns over the names of a checkpoint's tensors."""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from rptrain.models.layer import LayerShape
from rptrain.models.params import Param, Unit
from rptrain.models.spec import ModelShape
from rptrain.utils.errors import UserError
from rptrain.utils.suggest import nearest
from rptrain.utils.text import quoted

SHOWN, LISTED = 3, 10  # names in a line, and patterns in a message

Shape = TypeVar("Shape", bound=ModelShape)


def freeze(spec: Shape, patterns: Sequence[str]) -> Shape:
    """The model with all parameters frozen whose tensors match a pattern: "*" matches any text, "?" one character.

    A completely frozen unit is not trainable. A partly frozen unit keeps its frozen parameters; the others become a
    unit "<name>.trained" at the end of `units`, to which its layer refers next. Raises UserError if a pattern matches
    nothing or only a part of a stacked matrix, or if nothing is left to train.
    """
    names = [part.key for unit in spec.units for param in unit.params for part in param.parts]
    stored = {spec.stored_name(name): name for name in names}
    matched, unknown = set[str](), list[str]()
    for pattern in dict.fromkeys(patterns):
        found = {*fnmatch.filter(names, pattern), *(stored[name] for name in fnmatch.filter(stored, pattern))}
        matched.update(found)
        if not found:
            unknown.append(pattern)
    if unknown:
        more = [f"train.freeze: {len(unknown) - LISTED:,} more patterns match nothing"] if len(unknown) > LISTED else []
        lines = [f"train.freeze: {_unmatched(pattern, names)}" for pattern in unknown[:LISTED]]
        raise UserError("\n".join(lines + more))
    frozen = split_units(spec, lambda param: _is_frozen(param, matched))
    if not any(unit.trainable for unit in frozen.units):
        raise UserError("train.freeze leaves nothing to train: remove a pattern")
    return frozen


def split_units(spec: Shape, is_frozen: Callable[[Param], bool]) -> Shape:
    """The model with these parameters frozen; see `freeze`."""
    units, rest = list(spec.units), dict[int, int]()  # the unit with the trained part of a unit
    for index, unit in enumerate(spec.units):
        frozen = tuple(param for param in unit.params if is_frozen(param))
        if not frozen:
            continue
        units[index] = replace(unit, params=frozen, trainable=False)
        if trained := tuple(param for param in unit.params if param not in frozen):
            rest[index] = len(units)
            units.append(Unit(f"{unit.name}.trained", trained))

    def split(layer: LayerShape) -> Any:
        places = (place for unit in layer.units for place in (unit, rest.get(unit)))
        return replace(cast(Any, layer), units=tuple(place for place in places if place is not None))

    return replace(spec, units=tuple(units), layers=tuple(map(split, spec.layers)), head=split(spec.head))


def _is_frozen(param: Param, matched: set[str]) -> bool:
    frozen = [part.key for part in param.parts if part.key in matched]
    if frozen and len(frozen) < len(param.parts):
        others = _first([part.key for part in param.parts if part.key not in matched])
        raise UserError(
            f"train.freeze: {_first(frozen)} cannot be frozen without {others}: they are stored as one matrix; "
            "freeze all of them or none"
        )
    return bool(frozen)


def _first(names: Sequence[str]) -> str:
    """The first few of what may be hundreds of names."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _unmatched(pattern: str, names: Sequence[str]) -> str:
    close = nearest(pattern, names, SHOWN, 0)
    return f"{quoted(repr(pattern))} matches no tensor of the model; the closest names are {', '.join(close)}"
