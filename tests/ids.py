"""Ids of parametrized tests: short, plain, and the same in every process."""

import re
from enum import Enum
from types import FunctionType

import torch

LIMIT = 32  # characters of one value


def pytest_make_parametrize_id(val: object, argname: str) -> str:
    """Return a short value itself, the first words of a long text, and the parameter's name for everything else.

    pytest appends numbers to ids that occur more than once.
    """
    text = plain(val)
    if isinstance(val, str) and len(text) > LIMIT:
        text = re.sub("[_-]+[^_-]*$", "", text[: LIMIT + 1])[:LIMIT]
    return text if 0 < len(text) <= LIMIT else argname


def plain(value: object) -> str:
    """Spell `value` with letters, digits, "_", "." and "-"; empty if it has no such spelling."""
    match value:
        case Enum() | FunctionType() | type():
            name = value.name if isinstance(value, Enum) else value.__name__
            return name if name.isidentifier() else ""  # a lambda has no name
        case None | bool() | int() | float():
            return str(value).replace("+", "")
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case BaseException():
            return type(value).__name__
        case str() | tuple() | list() | dict() | set() if not value:
            return "empty"
        case str():
            words = re.sub(r"[^A-Za-z0-9_.\s-]+", "-", value)
            return re.sub(r"[_-]*\s[\s_-]*", "_", words).strip("_-")
        case tuple() | list():
            parts = [plain(item) for item in value]
            numbers = all(isinstance(item, int | float) and not isinstance(item, bool) for item in value)
            return ("x" if numbers else "-").join(parts) if all(parts) else ""
        case set():
            return plain(sorted(plain(item) for item in value))
        case dict():
            return plain(list(value.items()))
    return ""
