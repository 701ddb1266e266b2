"""Messages for mistakes in a config: what is wrong, where, and what to write."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from operator import getitem
from typing import Any

from pydantic_core import ErrorDetails

from rptrain.config.aliases import answer, answer_value
from rptrain.config.schema import AUTOMATIC, keys
from rptrain.config.toml_lines import KeyPath
from rptrain.config.types import MAX_COUNT
from rptrain.utils.errors import UserError
from rptrain.utils.suggest import typo_of
from rptrain.utils.text import LINES, more_lines, one_line, quoted

MISTAKES = "{count} mistakes in the config"
EXPLAINED = 200  # mistakes that are explained; the others are counted
DEEPEST = 16  # parts of a key that are looked at; keys of a config have at most 4


class ConfigError(UserError):
    """The mistakes of a config: pairs of a place ("file:line" or "command line") and a message.

    `heading`: the line above several mistakes, with {count} in it.

    `more`: how many others there are. `keys`: the dotted key of each mistake, if it is about one. `advice`: lines after
    the mistakes.
    """

    def __init__(
        self,
        mistakes: Sequence[tuple[str, str]],
        more: int = 0,
        keys: Sequence[str | None] = (),
        advice: Sequence[str] = (),
        heading: str = MISTAKES,
    ) -> None:
        self.mistakes = tuple(mistakes)
        self.keys = tuple(keys) or (None,) * len(self.mistakes)
        lines = [f"{place}: {message}" for place, message in mistakes]
        if len(lines) + more > 1:
            indented = (f"  {line.replace(chr(10), f'{chr(10)}    ')}" for line in lines)
            lines = [heading.format(count=f"{len(lines) + more:,}"), *indented]
        if more:
            lines.append(more_lines(more))
        super().__init__("\n".join([*lines, *advice]), EXPLAINED + LINES)


def dotted(key: KeyPath) -> str:
    return ".".join(map(str, key))


def leaves(value: object, key: KeyPath = ()) -> Iterator[KeyPath]:
    """The keys of all values in nested tables and arrays of tables; an array of plain values is one value, and so is
    what is nested deeper than DEEPEST.
    """
    if len(key) == DEEPEST:
        yield key
    elif isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from leaves(inner, (*key, name))
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*key, index))
    else:
        yield key


def explained(errors: Sequence[ErrorDetails]) -> tuple[list[tuple[KeyPath, str]], int]:
    """The first errors that pydantic found, as pairs of a key and a message, and the number of the others."""
    pairs = dict.fromkeys(pair for error in errors[:EXPLAINED] for pair in _explain(error))
    found = list(islice(pairs, EXPLAINED))
    total = sum(sum(1 for _ in _unknown(error)) if error["type"] == "extra_forbidden" else 1 for error in errors)
    return found, total - len(found) if total > EXPLAINED else 0


def _unknown(error: ErrorDetails) -> Iterator[KeyPath]:
    """The keys of an unknown value or table."""
    return leaves(error["input"], error["loc"])


def _explain(error: ErrorDetails) -> list[tuple[KeyPath, str]]:
    """Several pairs for an unknown table."""
    key, value, context = error["loc"], error["input"], error.get("ctx", {})
    name = _named(key)
    if (automatic := dotted(key[:2])) in AUTOMATIC and error["type"] != "extra_forbidden":
        return [
            (key[:2], f'`{automatic}` must be a whole number from 1 to {MAX_COUNT}, or "auto", not {_shown(value)}')
        ]
    match error["type"]:
        case "extra_forbidden":
            unknown = islice(_unknown(error), EXPLAINED)
            given = ((leaf, reduce(getitem, leaf[len(key) :], value)) for leaf in unknown)
            return [(leaf, f"unknown key `{_named(leaf)}`: {answer(_plain(leaf), inner)}") for leaf, inner in given]
        case "invalid_key":
            hint = answer(f"{_plain(key[:-1])}.{key[-1]}")
            return [(key, f"unknown key `{name}`: {hint}")]
        case "missing" if isinstance(key[-1], int):
            return [(key[:-1], f"`{dotted(key[:-1])}` has too few values")]
        case "missing" if key == ("data", "train"):
            return [(key, "`data.train` is missing: write a [[data.train]] table with a path")]
        case "missing":
            return [(key, f"`{name}` is missing: {keys()[_plain(key)].description}")]
        case "conflicts":
            return [(one.path, f"`{one.key}`: {one.text}") for one in context["conflicts"]]
        case "literal_error":
            choices = re.findall(r"'([^']*)'", context["expected"])
            return [(key, f"`{name}`: {_choices(choices, value, answer_value(_plain(key), value))}")]
        case "value_error" if isinstance(value, dict):
            return [(key, f"`{name}` {context['error']}")]
        case "dict_type":
            sentence = 'must be a table, such as {prompt = "question", completion = "answer"}'
        case "model_type":
            sentence = f"must be a table, [{name}]"
        case "tuple_type" if isinstance(value, dict):
            sentence = f"must be an array of tables: write [[{name}]], in two brackets"
        case "tuple_type":
            sentence = "must be a list, in brackets"
        case "too_short" if len(value) >= context["min_length"]:
            return []  # there are enough, with mistakes of their own
        case "too_short" | "too_long":
            sentence = re.sub(r"^\w+ should (.*) after validation.*", r"must \1", error["msg"])
        case "value_error":
            sentence = str(context["error"])
        case "string_type":
            sentence = "must be text, in quotes"
        case "bool_type":
            sentence = "must be true or false"
        case "int_type":
            sentence = "must be a whole number"
        case _:
            sentence = re.sub(r"^\w+ should", "must", error["msg"])
    advice = answer_value(_plain(key), shown(value))
    return [(key, f"`{name}` {sentence}, not {_shown(value)}{f'; {advice}' if advice else ''}")]


def _named(key: KeyPath) -> str:
    return quoted(dotted(key))


def _plain(key: KeyPath) -> str:
    return dotted(tuple(part for part in key if isinstance(part, str)))


def _choices(choices: list[str], value: Any, advice: str | None) -> str:
    if len(choices) == 1:
        return f'only "{choices[0]}" is available in this version, not {_shown(value)}'
    near = typo_of(str(value).lower(), choices)
    hint = f"; {advice}" if advice else f'; did you mean "{near}"?' if near else ""
    return f"must be one of {', '.join(map(_shown, choices))}, not {_shown(value)}{hint}"


def shown(value: Any) -> str:
    """A value in TOML; a word for tables."""
    match value:
        case None:
            return "not set"
        case str():
            return f'"{one_line(value)}"'
        case bool():
            return str(value).lower()
        case dict():
            return "a table"
        case [dict(), *_]:
            return "tables"
        case list():
            return f"[{', '.join(map(shown, value))}]"
        case _:
            return str(value)


def _shown(value: Any) -> str:
    return quoted(shown(value))
