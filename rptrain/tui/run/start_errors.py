"""What a trainer that did not start says: the first line of its error, and the setting to correct."""

import re
from collections.abc import Callable, Iterator
from itertools import count, takewhile

from rptrain.runs.folder.ending import start_failure
from rptrain.tui.services.fields import ALL, field_of
from rptrain.tui.services.launch import Launched

_COUNTS = re.compile(r" mistakes in the config$|cannot start, for [\d,]+ reasons$")
_CONTINUES = re.compile(r"\s|- |… and ")  # the beginning of a line that belongs to the one before it
_KEYS = {key: key for key in ALL} | {field.name: key for key, field in ALL.items()}
_OF_SET = re.compile(r"\bdata\.(?:train|val)\.\d+\.\w+")
_KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(_KEYS, key=len, reverse=True)))})(?![\w.]*\w)")


def error_of(output: str) -> str:
    """The last message of a trainer's output. One that only counts mistakes is followed by them."""
    lines = [line for line in output.splitlines() if line.strip()]
    start = next((n for n in reversed(range(len(lines))) if not _CONTINUES.match(lines[n])), 0)
    return "\n".join(line.strip() for line in lines[start:])


def start_error(launched: Launched) -> str:
    """Why a trainer that was started here ended before its first record. The output of a killed one does not say."""
    code = launched.process.returncode
    return ("" if code < 0 else error_of(launched.said())) or start_failure(code, launched.kills)


def first_line(error: str) -> str:
    """The first line of an error; the first mistake or reason if that line only counts them."""
    first, _, rest = error.partition("\n")
    return rest.partition("\n")[0] if _COUNTS.search(first) else first


def setting_of(error: str, value_of: Callable[[str], str]) -> str | None:
    """The setting that an error is about: its key in the form; None if that is unknown. `value_of`: the value of a
    key.
    """
    if (found := _OF_SET.search(error)) and field_of(found[0]):
        return found[0]
    if found := _KEY.search(error):
        return _KEYS[found[0]]
    return next((key for key in _named_by_value(value_of) if (value := value_of(key)) and value in error), None)


def _named_by_value(value_of: Callable[[str], str]) -> Iterator[str]:
    """The keys of settings whose values errors name instead of the key."""
    yield from takewhile(value_of, (f"data.train.{number}.path" for number in count()))
    yield "model.path"
