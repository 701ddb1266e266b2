"""Rows of a data file: chat messages, alpaca or raw text, told apart by looking."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from rptrain.errors import UserError

log = logging.getLogger(__name__)

Message = dict[str, Any]  # "role" and "content" are text; other keys are the chat template's affair
MOST_BAD = 0.01  # share of the rows that may be bad
SHOWN = 5  # bad rows that a report quotes


@dataclass(frozen=True)
class Example:
    """A conversation, or a raw text; exactly one is set. `line` counts from 1: items in a JSON list."""

    file: str
    line: int
    messages: list[Message] | None = None
    text: str | None = None

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def text_of(row: dict[str, Any], key: str) -> str:
    """The text under `key`; ValueError where it is missing or something else."""
    if key not in row:
        raise ValueError(f"`{key}` is missing")
    if not isinstance(row[key], str):
        raise ValueError(f"`{key}` is not text")
    try:
        row[key].encode()
    except UnicodeEncodeError:
        raise ValueError(f"`{key}` has half a character: a lone surrogate") from None
    return row[key]


def messages_of(row: dict[str, Any]) -> list[Message]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("`messages` is not a list with at least one message")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("a message is not an object with `role` and `content`")
        text_of(message, "role")
        text_of(message, "content")
    if row.get("tools"):
        raise ValueError("`tools` are not supported")
    return messages


def alpaca_of(row: dict[str, Any]) -> list[Message]:
    instruction, answer = text_of(row, "instruction"), text_of(row, "output")
    more = text_of(row, "input") if row.get("input") is not None else ""
    question = f"{instruction}\n\n{more}" if more else instruction
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def raw_text_of(row: dict[str, Any]) -> str:
    if not (text := text_of(row, "text")).strip():
        raise ValueError("`text` is empty")
    return text


@dataclass(frozen=True)
class Format:
    keys: frozenset[str]  # a row that has all of them is of this format
    field: str  # of Example
    parse: Callable[[dict[str, Any]], Any]  # ValueError: the row is bad


FORMATS = {
    "messages": Format(frozenset({"messages"}), "messages", messages_of),
    "alpaca": Format(frozenset({"instruction", "output"}), "messages", alpaca_of),
    "text": Format(frozenset({"text"}), "text", raw_text_of),
}


def read(path: str | Path, format: str = "auto") -> list[Example]:
    """The examples of a .jsonl or .json file (lines, or one list), or of a .txt file, which is one document.

    `format` is a key of FORMATS, or "auto": the first row that has a format's keys decides for the file.
    UserError: no such file, no such format, no row in it, or more than 1 % of its rows are bad. Fewer bad
    rows are left out with a warning.
    """
    path = Path(path)
    if format != "auto" and format not in FORMATS:
        raise UserError(f"{path}: there is no data format {format!r}; use auto, {', '.join(FORMATS)}")
    if not isfile(path):
        raise UserError(f"{path}: no such data file" + (" (it is a directory)" if isdir(path) else ""))
    rows = list(_text_document(path) if path.suffix == ".txt" else _rows(path))
    if not rows:
        raise UserError(f"{path}: the file has no rows")
    chosen = FORMATS[_look(path, rows) if format == "auto" else format]
    examples: list[Example] = []
    bad: list[tuple[int, str]] = []
    for line, row in rows:
        try:
            if not isinstance(row, dict):
                raise row if isinstance(row, ValueError) else ValueError("not a JSON object")
            examples.append(Example(str(path), line, **{chosen.field: chosen.parse(row)}))
        except ValueError as error:
            bad.append((line, str(error)))
    report_bad([f"{path}:{line}: {reason}" for line, reason in bad], len(rows))
    return examples


def report_bad(bad: list[str], total: int) -> None:
    """Warns of bad rows, each given as "file:line: reason"; UserError: more than 1 % of `total`."""
    if not bad:
        return
    more = [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
    report = "\n  ".join([f"{len(bad)} of {total} rows are bad:", *bad[:SHOWN], *more])
    if len(bad) > MOST_BAD * total:
        raise UserError(f"{report}\nMore than 1 % stops the run: mend or remove them, or set the format.")
    log.warning("%s\nThey are left out.", report)


def _text_document(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error
    yield 1, {"text": text}


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Line and decoded row; a row that is not JSON is its ValueError."""
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if start.startswith(b"["):
            try:
                yield from enumerate(json.load(file), 1)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}: not a JSON list: {error}") from error
            return
        for line, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                yield line, json.loads(data)
            except ValueError as error:
                yield line, error
            except RecursionError:
                yield line, ValueError("nested too deeply")


def _look(path: Path, rows: list[tuple[int, Any]]) -> str:
    for _, row in rows:
        if isinstance(row, dict):
            for name, format in FORMATS.items():
                if format.keys <= row.keys():
                    return name
    keys = next((sorted(row) for _, row in rows if isinstance(row, dict)), None)
    first = f"its first row has {', '.join(keys)}" if keys else f"its first row: {rows[0][1]}"
    wanted = "; ".join(f"{name}: {', '.join(sorted(format.keys))}" for name, format in FORMATS.items())
    raise UserError(f"{path}: no known data format; {first}. Known formats and their keys: {wanted}.")
