"""Values of Arrow's structs, maps and JSON texts as JSON would hold them.

The type of a column is the union of the fields of all its rows. Fields that a row does not have are null, and cannot be
told from those that are null in the row, so null fields of structs are left out. `datasets` stores a column of mixed
types as JSON texts, of the extension type `arrow.json`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rptrain.data.notes import key_of
from rptrain.data.values import json_of

CHATS = ("messages", "conversations", "prompt", "completion")  # null keys of messages never were in the row
TOOLS = ("tools", "functions")
TEXTS = ("content", "value")  # fields that are text, even where the text is a number in JSON

Convert = Callable[[Any], Any]


class Converted(dict[str, Any]):
    """A row of which messages or tools were changed, with the keys of notes that say so."""

    notes: tuple[str, ...] = ()


def convert_rows(rows: list[dict[str, Any]], schema: Any) -> list[dict[str, Any]]:
    """The rows of `to_pylist`, which are changed in place."""
    columns = [column for field in schema if (column := _Column(field.name, field.type)).convert]
    if not columns:
        return rows
    return [_converted(row, columns) for row in rows]


def _converted(row: dict[str, Any], columns: Sequence["_Column"]) -> dict[str, Any]:
    notes = set[str]()
    for column in columns:
        if column.convert and row[column.name] is not None:
            row[column.name] = column.convert(row[column.name])
            notes |= column.notes
            column.notes.clear()
    if not notes:
        return row
    converted = Converted(row)
    converted.notes = tuple(sorted(notes))
    return converted


class _Column:
    """How the values of a column are converted. `convert` is None if they stay as they are."""

    def __init__(self, name: str, kind: Any):
        self.name = name
        self.notes = set[str]()  # of the values converted since it was cleared
        self._counts = name in CHATS or name in TOOLS
        self.convert = self._of(kind, within=False, counts=name in TOOLS)

    def _of(self, kind: Any, *, within: bool, counts: bool, name: str = "") -> Convert | None:
        """`within`: whether the value is part of a struct; `counts`: whether its null fields are noted."""
        from pyarrow import BaseExtensionType, types

        if isinstance(kind, BaseExtensionType):
            return self._json(name) if kind.extension_name == "arrow.json" else None
        if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
            return self._of(kind.value_type, within=within, counts=counts, name=name)
        if types.is_struct(kind):
            fields = {
                field.name: self._of(field.type, within=True, counts=self._counts, name=field.name) for field in kind
            }
            return self._struct({key: convert for key, convert in fields.items() if convert}, counts)
        if types.is_map(kind):
            convert = self._of(kind.item_type, within=within, counts=self._counts)
            return self._map(convert) if within or convert else None
        if types.is_nested(kind) and not types.is_union(kind):  # lists
            convert = self._of(kind.value_type, within=within, counts=counts)
            return convert and (lambda items: [item if item is None else convert(item) for item in items])
        return None

    def _struct(self, fields: dict[str, Convert], counts: bool) -> Convert:
        def convert(value: dict[str, Any]) -> dict[str, Any]:
            kept = {key: item for key, item in value.items() if item is not None}
            for key in fields.keys() & kept.keys():
                kept[key] = fields[key](kept[key])
            if counts and len(kept) < len(value):
                self.notes.add(key_of("nulls"))
            return kept

        return convert

    def _map(self, convert: Convert | None) -> Convert:
        def converted(pairs: list[tuple[Any, Any]]) -> Any:
            made = [(key, item if item is None or not convert else convert(item)) for key, item in pairs]
            texts = {key for key, _ in made if isinstance(key, str)}
            return dict(made) if len(texts) == len(made) else made

        return converted

    def _json(self, name: str) -> Convert:
        def convert(text: str) -> Any:
            try:
                value = json_of(text)
            except ValueError:
                return text
            if name in TEXTS and not isinstance(value, str | list | dict):
                return text
            if self._counts and value != text:
                self.notes.add(key_of("json_text", self.name))
            return value

        return convert
