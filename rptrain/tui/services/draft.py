"""A config that is being edited: TOML text that keeps its comments, and the values of its keys."""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_origin

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Item, Table

from rptrain.config.errors import dotted, leaves
from rptrain.config.resolve import Resolved, parse_value, resolve
from rptrain.config.schema import Config, keys
from rptrain.config.toml_lines import KeyPath
from rptrain.runs.folder.outputs import replace_text
from rptrain.tui.services import toml_tables
from rptrain.tui.services.fields import schema_name
from rptrain.utils.errors import UserError, describe
from rptrain.utils.files import read_small_text

STARTER = """\
# A run of rptrain. To train without the interface: rptrain --config FILE
# rptrain --keys lists every key there is, with its default.

[model]
path = "tiny-tasks"

[[data.train]]
path = "builtin:tasks"
"""
# Keys with text, which is written without quotes.
PLAIN = frozenset(
    {"model.path", "data.train.path", "data.val.path", "save.output_dir", "log.run_name", "data.chat_template"}
)


class Draft:
    """The text of a config, and its file, which may not exist yet."""

    def __init__(self, path: Path, text: str = STARTER) -> None:
        self.path = path
        self._saved = text
        self._adapters: Any = None  # the removed [lora] table, while all weights are trained
        try:
            self._document = tomlkit.parse(text)
        except TOMLKitError as error:
            raise UserError(f"{path}: invalid TOML: {error}") from None

    @classmethod
    def open(cls, path: Path | str) -> "Draft":
        """The config in a file, or the starter if there is none. Raises UserError if the file is not valid TOML."""
        path = Path(path)
        try:
            return cls(path, read_small_text(path, "utf-8-sig"))
        except FileNotFoundError:
            return cls.instead_of(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {describe(error)}") from None

    @classmethod
    def instead_of(cls, path: Path) -> "Draft":
        """The starter, for a file that does not exist or holds something else."""
        return cls.unsaved(path, STARTER)

    @classmethod
    def unsaved(cls, path: Path, text: str) -> "Draft":
        """A text that is not in its file yet."""
        draft = cls(path, text)
        draft._saved = ""
        return draft

    @property
    def text(self) -> str:
        return tomlkit.dumps(self._document)

    @property
    def is_changed(self) -> bool:
        """Whether the text differs from the file."""
        return self.text != self._saved

    @property
    def is_new(self) -> bool:
        """Whether it was neither read from a file nor saved to one."""
        return not self._saved

    @property
    def is_changed_outside(self) -> bool:
        """Whether the file exists and was changed since it was last read or written here."""
        try:
            return read_small_text(self.path, "utf-8-sig") != self._saved
        except FileNotFoundError:
            return False
        except (OSError, UserError, UnicodeDecodeError):
            return True

    def shown(self, key: str) -> str:
        """The value of a dotted key as a user writes it, text without quotes; empty if it is not set."""
        node: Any = self._document
        for part in _parts(key):
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                return ""
        return node if isinstance(node, str) else node.as_string() if isinstance(node, Item) else json.dumps(node)

    def has(self, table: str) -> bool:
        return table in self._document

    def set_keys(self) -> list[str]:
        """All keys that the text sets, dotted."""
        return [dotted(key) for key in leaves(self._document.unwrap())]

    def put(self, key: str, shown: str) -> None:
        """Sets a key to the text that a user wrote; an empty text removes the key.

        Raises UserError if the text is not valid TOML, or if the place of the key holds something else.
        """
        shown = shown.strip()
        if shown == self.shown(key):
            return
        if key == "train.method":
            self._switch_adapters(shown)
        try:
            value = _item(key, shown) if shown else None
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
        try:
            self._put(_parts(key), value)
        except (TypeError, AttributeError, TOMLKitError):
            raise UserError(f"{key}: the file has something else there: edit it by hand") from None

    def update(self, values: Mapping[str, str]) -> None:
        for key, shown in values.items():
            self.put(key, shown)

    @property
    def train_sets(self) -> int:
        """The number of training sets; at least 1, because one that is missing has to be set."""
        sets = _at(self._document, ("data", "train"))
        return max(1, len(sets)) if isinstance(sets, list) else 1

    def add_train_set(self, path: str) -> None:
        """Adds a training set after the others. Raises UserError as `put`, or if the sets are in several places."""
        sets = _at(self._document, ("data", "train"))
        number = len(sets) if isinstance(sets, list) else 0
        with self._sets_become(number + 1):
            self.put(f"data.train.{number}.path", path)

    def remove_train_set(self, number: int) -> None:
        """Removes one of several training sets, from 0, with its comments. Raises UserError if the sets are in several
        places.
        """
        with self._sets_become(self.train_sets - 1):
            toml_tables.remove(_at(self._document, ("data", "train")), number)

    @contextmanager
    def _sets_become(self, count: int) -> Iterator[None]:
        """Checks the number of training sets after a change. With another table between two of them, tomlkit changes
        only a copy of their list.
        """
        before = self.text
        yield
        if len(_at(tomllib.loads(self.text), ("data", "train"))) != count:
            self._document = tomlkit.parse(before)
            raise UserError(
                f"{self.path}: another table stands between two [[data.train]]: put these next to each other by hand"
            )

    def become(self, config: Config) -> None:
        """Changes the text to a config's values that differ from the defaults.

        Comments of remaining keys are kept, if the file's tables are in order.
        """
        settings = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        if config.adapters is not None and not settings.get("lora"):
            settings["train"] = settings.get("train", {}) | {"method": "lora"}
            settings.pop("lora", None)
        settings = _brief(settings)
        with suppress(TypeError, AttributeError, KeyError, TOMLKitError):  # something else in the place of a table
            self._take_over(settings)
        if tomllib.loads(self.text) != settings:
            self._document = tomlkit.parse(tomlkit.dumps(settings))
        self._adapters = None

    def _take_over(self, settings: Mapping[str, Any]) -> None:
        wanted = {key: _at(settings, key) for key in leaves(settings)}
        for key in leaves(self._document.unwrap()):
            if key not in wanted:
                self._put(list(key), None)
        _prune(self._document)
        for key, value in wanted.items():
            if _at(self._document, key) != value:
                self._put(list(key), tomlkit.item(value))

    def resolved(self) -> Resolved:
        """The checked config. Raises ConfigError with every mistake."""
        return resolve(self.path, text=self.text)

    def save(self) -> None:
        """Writes the file as a whole and keeps its mode. Does nothing if only line ends differ. Raises UserError if it
        cannot be written.
        """
        if not self.is_changed and self.path.exists() and not self.is_changed_outside:
            return
        text = self.text
        replace_text(self.path, text)
        self._saved = text

    @contextmanager
    def moved(self, path: Path) -> Iterator[None]:
        """Within the block it belongs to another file, and afterwards too if it was saved to this file."""
        if os.path.abspath(path) == os.path.abspath(self.path):
            yield
            return
        before = self.path, self._saved
        self.path, self._saved = path, ""
        try:
            yield
        finally:
            if self.is_new:
                self.path, self._saved = before

    def _switch_adapters(self, method: str) -> None:
        """Removes the [lora] table if all weights are trained, where it is an error, and restores it for adapters."""
        if method == "lora":
            if self._adapters is not None and "lora" not in self._document:
                self._document["lora"] = self._adapters
        elif "lora" in self._document:
            self._adapters = self._document.pop("lora")

    def _put(self, parts: list[str | int], value: Any) -> None:
        node: Any = self._document
        for depth, part in enumerate(parts[:-1]):
            is_array = isinstance(parts[depth + 1], int)
            if isinstance(part, int):
                if part == len(node):
                    toml_tables.append(node)
            elif part not in node:
                if value is None:
                    return
                node[part] = tomlkit.aot() if is_array else tomlkit.table()
            node = node[part]
        last = parts[-1]
        if value is None:
            node.pop(last, None)
        else:
            if isinstance(node, Table) and last not in node:
                toml_tables.add_key(node, str(last), value)
            else:
                node[str(last)] = value
            if isinstance(value, Item) and not isinstance(value, Table | AoT):
                value.trivia.comment = value.trivia.comment_ws = ""  # it was about the value before


def method_of(draft: Draft) -> str:
    """The method of a config: adapters if it has a [lora] table."""
    return draft.shown("train.method") or ("lora" if draft.has("lora") else "full")


def _item(key: str, shown: str) -> Item:
    """The value for the document; a number keeps its notation, such as 2e-5."""
    if not shown.startswith("[") and _is_list(key):
        return tomlkit.item([parse_value(part.strip()) for part in shown.split(",")])
    value = shown if schema_name(key) in PLAIN else parse_value(shown)
    if not isinstance(value, str):
        with suppress(TOMLKitError):  # a comment after it is removed
            return tomlkit.value(shown)
    return tomlkit.item(value)


def _is_list(key: str) -> bool:
    """Whether the key accepts only a list."""
    field = keys().get(schema_name(key))
    return field is not None and get_origin(field.annotation) is tuple


def _at(node: Any, key: KeyPath) -> Any:
    """The value at a key, or None."""
    for part in key:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def _brief(value: Any) -> Any:
    """Values as a person writes them: 40 for 40.0."""
    if isinstance(value, Mapping):
        return {key: _brief(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_brief(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prune(node: Any) -> None:
    """Removes empty tables."""
    inside: list[tuple[Any, Any]] = list(enumerate(node) if isinstance(node, AoT) else node.items())
    for part, inner in reversed(inside):
        if isinstance(inner, Mapping | AoT):
            _prune(inner)
            if not inner:
                del node[part]


def _parts(key: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in key.split(".")]
