"""Values of rows as people write them: texts, and lists and objects that may be written as JSON text."""

import json
import re
from typing import Any

from rptrain.utils.objects import unique_keys, whole_number

BLANK = {"", "null", "None", "nan", "{}", "[]"}  # texts for no value, as in CSV
DEEP = 3  # levels of lists and objects that are searched for a value
PYTHON = re.compile(r"\s*\[\s*\{'(?:role|content|from|value)':")  # how Python prints a list of messages


def text_of(row: dict[str, Any], key: str) -> str:
    """The text under `key`. Raises ValueError if it is missing or not a text."""
    if key not in row:
        raise ValueError(f"`{key}` is missing")
    if not isinstance(row[key], str):
        raise ValueError(f"`{key}` is not text")
    try:
        row[key].encode()
    except UnicodeEncodeError:
        raise ValueError(f"`{key}` has half a character: a lone surrogate") from None
    return row[key]


def is_blank(value: Any, depth: int = DEEP) -> bool:
    """Whether there is no value: null, false, an empty text, or lists and objects of such values only."""
    if isinstance(value, str):
        return value.strip() in BLANK
    if isinstance(value, list | dict) and depth:
        return all(is_blank(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))
    return not value or value != value  # the latter: NaN


def json_of(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_int=whole_number)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def object_of(value: Any) -> Any:
    """The object that a JSON text holds; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json_of(value)
    except ValueError:
        return value


def list_of(row: dict[str, Any], key: str) -> list[Any]:
    """A list, or the JSON text of a list, as in tables. Raises ValueError for anything else."""
    value = row.get(key)
    if isinstance(value, str):
        check_not_python(value, key)
        try:
            value = json_of(value)
        except ValueError:
            value = None
    if not isinstance(value, list):
        raise ValueError(f"`{key}` is not a list")
    return value


def check_not_python(text: str, key: str) -> None:
    """Raises ValueError for messages as Python prints them, which pandas writes to CSV."""
    if PYTHON.match(text):
        raise ValueError(f"`{key}` is a list as Python prints it: write it as JSON, with `json.dumps`")
