"""Whether the fields of a record that JSON gave are of the types that its class says."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from sys import float_info
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST = 1 << 63  # of a whole number
LATEST = 1e11  # Unix seconds

Check = Callable[[Any], bool]


def fits(record: Any, kind: type) -> bool:
    """Whether what a JSON object has of a dataclass's fields is of their types, numbers finite. Some may be missing."""
    return _checker(kind)(record)


def is_time(value: Any) -> bool:
    """Whether it is Unix seconds that a clock can show."""
    return type(value) in (int, float) and 0 <= value < LATEST


@cache
def _checker(hint: Any) -> Check:
    if is_dataclass(hint):
        return _dataclass(hint)
    if hint is Any:
        return lambda value: True
    if hint is int:
        return lambda value: type(value) is int and -LARGEST < value < LARGEST
    if hint is float:
        return lambda value: type(value) in (int, float) and abs(value) <= float_info.max
    if hint in (str, bool, NoneType):
        return lambda value: type(value) is hint
    origin, of = get_origin(hint), get_args(hint)
    if origin is Literal:
        return lambda value: value in of
    checks = [_checker(one) for one in of if one is not ...]
    if origin in (Union, UnionType):
        return lambda value: any(check(value) for check in checks)
    if origin is tuple and ... in of:
        return lambda value: type(value) is list and all(map(checks[0], value))
    if origin is tuple:
        return lambda value: (
            type(value) is list
            and len(value) == len(checks)
            and all(check(one) for check, one in zip(checks, value, strict=True))
        )
    assert origin is Mapping, hint
    return lambda value: type(value) is dict and all(map(checks[0], value)) and all(map(checks[1], value.values()))


def _dataclass(kind: Any) -> Check:
    hints = get_type_hints(kind)
    checks = {field.name: _checker(hints[field.name]) for field in fields(kind)}
    return lambda value: (
        type(value) is dict and all(check(value[name]) for name, check in checks.items() if name in value)
    )
