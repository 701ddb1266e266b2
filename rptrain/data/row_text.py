"""Rows of data files as they are written there: to copy them, and to show those that cannot be read."""

import csv
import json
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from rptrain.data import json_list
from rptrain.data.read import BOM, is_list, kind_of, lines_of, rows_of
from rptrain.utils.errors import UserError, describe
from rptrain.utils.files import open_regular, regular


def texts_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The rows of a JSON or CSV file with the numbers that `rows_of` gives them; blank lines have one too.

    The first of a CSV file is its header, with number 0. Raises as `rows_of`.
    """
    try:
        if kind_of(path) == ".csv":
            yield from _csv_texts(path)
            return
        with open_regular(path) as file:
            if is_list(file):
                for number, _, text in json_list.values_and_texts(file):
                    yield number, text.encode()
            else:
                yield from enumerate(lines_of(path, file), 1)
    except UserError:  # a ValueError, too
        raise
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {describe(error)}") from error


def _csv_texts(path: Path) -> Iterator[tuple[int, bytes]]:
    lines: list[str] = []  # of the current record, which may be several

    def read() -> Iterator[str]:
        for line in lines_of(path, file):
            lines.append(line)
            yield line

    with open(path, encoding="utf-8", newline="", errors="surrogateescape", opener=regular) as file:
        if file.read(1).encode(errors="surrogateescape") != BOM:
            file.seek(0)
        reader = csv.reader(read(), strict=True)
        for record, _ in enumerate(reader):
            yield reader.line_num if record else 0, as_bytes("".join(lines))
            lines.clear()


def as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def as_text(data: bytes) -> str:
    """Any bytes as text, from which `as_bytes` makes the same bytes."""
    return data.decode(errors="surrogateescape")


def json_text(value: Any) -> str:
    """A value as JSON; bytes as text, and values that JSON does not have, such as dates, as Python shows them."""

    def other(value: Any) -> str:
        return as_text(value) if isinstance(value, bytes) else str(value)

    text = json.dumps(value, ensure_ascii=False, default=other)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character, or bytes that are not UTF-8
        return json.dumps(value, default=other)
    return text


def beginnings(path: Path, numbers: Set[int], characters: int) -> dict[int, str]:
    """Some rows, with their numbers, as they are in the file and those of tables as JSON, each cut to its beginning.

    Rows of tables with text that is not UTF-8 are left out. Reads the file up to the last of these rows.
    """
    rows: Iterator[tuple[int, Any]]
    rows = rows_of(path, characters) if kind_of(path) in (".parquet", ".arrow", ".txt") else texts_of(path)
    found = dict[int, str]()
    for number, row in rows:
        if number in numbers and not isinstance(row, ValueError):
            text = row.decode(errors="replace").strip() if isinstance(row, bytes) else json_text(row)
            found[number] = text[:characters] + ("…" if len(text) > characters else "")
        if number >= max(numbers):
            break
    return found
