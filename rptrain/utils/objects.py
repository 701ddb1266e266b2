"""JSON objects without duplicate keys."""

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text


class DuplicateKey(ValueError):
    """A JSON object has a key twice."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` of json. Raises DuplicateKey for duplicate keys, which are ambiguous."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise DuplicateKey(f"an object has the key {twice!r} twice")
    return made


def whole_number(digits: str) -> int:
    """A `parse_int` of json. Raises ValueError for more digits than Python converts."""
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"a number has {len(digits.lstrip('-')):,} digits") from None


def check_keys(file: Path) -> None:
    """UserError if an object in a JSON file that another library reads has duplicate keys.

    Other mistakes in the file are left to the library.
    """
    try:
        with suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            json.loads(read_small_text(file), object_pairs_hook=unique_keys)
    except DuplicateKey as error:
        raise UserError(f"{file}: {error}: keep one of them") from None
