"""Read a TOML file and `key=value` overrides into a checked config with the origin of each value."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date, time
from itertools import islice
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rptrain.config.aliases import keys_in
from rptrain.config.errors import DEEPEST, ConfigError, dotted, explained, leaves
from rptrain.config.foreign import ADVICE, format_of
from rptrain.config.schema import Config
from rptrain.config.toml_lines import KeyPath, key_lines
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.text import one_line, quoted

COMMAND_LINE = "command line"
PYTHON = "Python"
DEFAULT = "default"
INDEX = re.compile("[0-9]{1,9}")  # the place of a data set in a key


@dataclass(frozen=True)
class Resolved:
    """A config with the origin of each key: "file:line", "command line", "Python" or "default". `path`: that of the
    file.
    """

    config: Config
    origins: Mapping[str, str]  # by dotted key, those of data sets as `data.train.0.path`
    path: Path

    def place(self, key: str) -> str:
        """Where a mistake about a key is reported: its origin, with the key unless that is a line of a file, or the
        file if it is not set.
        """
        origin = self.origins.get(key, DEFAULT)
        if origin == DEFAULT:
            return str(self.path)
        return f"{origin}, {key}" if origin in (COMMAND_LINE, PYTHON) else origin

    @classmethod
    def of(cls, config: Config) -> Self:
        """A config from Python: its keys are those that were set there. UserError for anything else."""
        if not isinstance(config, Config):
            raise UserError(f"a config is needed, not {type(config).__name__}: make one with load_config")
        keys = leaves(config.model_dump(mode="json"))
        origins = {dotted(key): PYTHON if _is_set(config, key) else DEFAULT for key in keys}
        return cls(config, origins, Path(PYTHON))


def resolve(path: Path | str, overrides: Sequence[str] = (), text: str | None = None) -> Resolved:
    """Reads the file, or `text` in its place, applies the overrides in order, and checks the result.

    Raises ConfigError with the mistakes found, in the order of the file and then of the command line.
    """
    path = Path(path)
    document, lines = _parse(path, read_text(path) if text is None else text)
    return _resolve(document, lines, overrides, path, one_line(path.stem.lstrip(".")) or "run")


def resolve_mapping(document: Mapping[str, Any], overrides: Sequence[str] = ()) -> Resolved:
    """As `resolve`, but of values from Python: a mapping of tables, as TOML has them."""
    return _resolve(_with_text(document), {}, overrides, Path(PYTHON), "run")


def _with_text(value: Any) -> Any:
    """A copy of a value from Python with paths as text."""
    if isinstance(value, Mapping):
        return {key: _with_text(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text(one) for one in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _resolve(
    document: dict[str, Any], lines: Mapping[KeyPath, int], overrides: Sequence[str], path: Path, run_name: str
) -> Resolved:
    places: dict[KeyPath, int] = dict(lines)  # line numbers; _LAST for the command line
    mistakes: list[tuple[int, str, str | None]] = []
    refused = list[str]()  # keys of overrides that are not valid
    for override in overrides:
        try:
            key, value = _parse_override(override)
            document = _assigned(document, key, value)
        except UserError as error:
            mistakes.append((_LAST, str(error), None))
            refused.append(override.partition("=")[0].strip())
            continue
        places = {old: place for old, place in places.items() if old[: len(key)] != key}
        for depth in range(1, len(key) + 1):
            places.setdefault(key[:depth], _LAST)

    def line_of(key: KeyPath) -> int:
        while key and key not in places:
            key = key[:-1]
        return places.get(key, 0)

    def origin(line: int) -> str:
        return COMMAND_LINE if line == _LAST else f"{path}:{line}" if line else str(path)

    config, more = None, 0
    try:
        config = Config.model_validate({"model": {}, "data": {}} | document)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        found, more = explained(errors)
        found += _conflicts_beside(document, errors, [*refused, *(key for _, text in found for key in keys_in(text))])
        mistakes += [(line_of(key), message, dotted(key)) for key, message in found]
    if config is None or mistakes:
        mistakes.sort(key=lambda mistake: mistake[0])
        places_and_messages = [(origin(line), message) for line, message, _ in mistakes]
        raise ConfigError(places_and_messages, more, [key for _, _, key in mistakes])
    if config.log.run_name is None:
        config = config.model_copy(update={"log": config.log.model_copy(update={"run_name": run_name})})
    written = set(leaves(document))
    return Resolved(
        config,
        {
            dotted(key): origin(line_of(key)) if key in written else DEFAULT
            for key in leaves(config.model_dump(mode="json"))
        },
        path,
    )


def _is_set(config: Config, key: KeyPath) -> bool:
    value: Any = config
    for part in key:
        if isinstance(value, BaseModel):
            if part not in value.model_fields_set:
                return False
            value = getattr(value, str(part))
        elif isinstance(part, int):
            value = value[part]
    return True


def _conflicts_beside(
    document: Mapping[str, Any], errors: Sequence[ErrorDetails], doubtful: Sequence[str]
) -> list[tuple[KeyPath, str]]:
    """The mistakes in how keys go together, besides errors in single keys, which pydantic reports alone.

    They are those of the document with defaults in place of the keys with errors, except if they depend on one of
    these or of the `doubtful` keys.
    """
    if any(error["type"] == "conflicts" for error in errors):
        return []
    wrong = {dotted(error["loc"][:2]) for error in errors}.union(doubtful)
    sections = {
        name: {key: value for key, value in section.items() if f"{name}.{key}" not in wrong}
        for name, section in document.items()
        if isinstance(section, Mapping) and name not in wrong
    }
    model, data = (
        {"path": "model"} | sections.get("model", {}),
        {"train": [{"path": "data"}]} | sections.get("data", {}),
    )
    try:
        Config.model_validate({**sections, "model": model, "data": data})
    except ValidationError as error:
        return [
            (one.path, f"`{one.key}`: {one.text}")
            for found in error.errors(include_url=False)
            for one in found.get("ctx", {}).get("conflicts", ())
            if wrong.isdisjoint(one.keys)
        ]
    return []


def render(resolved: Resolved) -> str:
    """The config as TOML, each key followed by its origin; keys that are not set are left out.

    The text parses back to the same config.
    """
    import tomlkit

    def table(values: Mapping[str, Any], prefix: str) -> Any:
        result = tomlkit.table()
        for name, value in values.items():
            if isinstance(value, list) and value and isinstance(value[0], Mapping):
                rows = tomlkit.aot()
                for index, row in enumerate(value):
                    rows.append(table(row, f"{prefix}.{name}.{index}"))
                result.add(name, rows)
            elif isinstance(value, Mapping):  # columns of data
                inline = tomlkit.inline_table()
                inline.update(value)
                origin = resolved.origins[".".join([prefix, name, *islice(value, 1)])]
                result.add(name, inline.comment(one_line(origin)))
            else:
                origin = one_line(resolved.origins[f"{prefix}.{name}"])  # a file's name may have any characters
                result.add(name, tomlkit.item(value).comment(origin))
        return result

    document = tomlkit.document()
    for name, section in resolved.config.model_dump(mode="json", exclude_none=True).items():
        document.add(name, table(section, name))
    return document.as_string()


_LAST = 1 << 30  # the command line's place: after every line of the file


def read_text(path: Path) -> str:
    """The text of a config. Raises UserError if it cannot be read."""
    try:
        return read_small_text(path, "utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: `rptrain init` writes a config to start from") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None


def _parse(path: Path, text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        return tomllib.loads(text), key_lines(text)
    except tomllib.TOMLDecodeError as error:
        if name := format_of(path, text):
            raise UserError(f"{path} is {name}, and a config is TOML: {ADVICE}") from None
        message, _, position = str(error).rpartition(" (at ")
        line = position.removeprefix("line ").partition(",")[0]
        if not line.isdigit():  # "end of document"
            line = str(text.rstrip().count("\n") + 1)
        raise ConfigError([(f"{path}:{line}", f"invalid TOML: {message}")]) from None
    except (RecursionError, ValueError) as error:  # a number of thousands of digits is a ValueError of its own
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path}: invalid TOML: {reason}") from None


def _parse_override(override: str) -> tuple[KeyPath, Any]:
    name, equals, text = (part.strip() for part in override.partition("="))
    if override != override.encode(errors="replace").decode():
        raise UserError(f"`{quoted(override)}` is not UTF-8 text")
    key = tuple(int(part) if INDEX.fullmatch(part) else part for part in name.split("."))
    if not equals or "" in key or isinstance(key[0], int):
        raise UserError(f"`{quoted(override)}` is not an override: write key=value, such as train.max_steps=20")
    if len(key) > DEEPEST:
        raise UserError(f"unknown key `{quoted(dotted(key[:DEEPEST]))}…`: no key has {len(key):,} parts")
    try:
        return key, parse_value(text)
    except UserError as error:
        raise UserError(f"`{quoted(override)}`: {error}; put the whole override in single quotes") from None


def parse_value(text: str) -> Any:
    """The value of a text: TOML, or a bare word without quotes. Raises UserError for invalid TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (RecursionError, ValueError):
        parsed = {}
    if parsed.keys() != {"value"}:
        if text[:1] in ("[", "{", '"', "'"):
            raise UserError("the value is not valid TOML")
        return text
    value = parsed["value"]
    return text if isinstance(value, date | time) else value


def _assigned(document: dict[str, Any], key: KeyPath, value: Any) -> dict[str, Any]:
    """A copy with one key set; creates missing tables. The index after an array's last element appends."""
    document = deepcopy(document)
    node: Any = document
    for depth, part in enumerate(key):
        is_last = depth + 1 == len(key)
        if isinstance(node, list):
            parent = dotted(key[:depth])
            if is_last and not isinstance(value, Mapping):
                raise UserError(f"`{quoted(dotted(key))}`: set the whole of it, {parent}=[...]")
            if not isinstance(part, int) or part > len(node):
                raise UserError(f"`{quoted(dotted(key))}`: the next free index is {parent}.{len(node)}")
            if part == len(node):
                node.append({})
        elif not isinstance(node, dict):
            raise UserError(f"`{quoted(dotted(key))}`: {quoted(dotted(key[:depth]))} is a value, not a table")
        elif part not in node and not is_last:
            node[part] = [] if isinstance(key[depth + 1], int) else {}
        inner: Any = node  # a table or an array by now, and `part` a key of it
        if is_last:
            inner[part] = value
        else:
            node = inner[part]
    return document
