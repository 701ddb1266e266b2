"""Values of a JSON list, read in pieces: of a large file, no more than is used."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from rptrain.utils.objects import unique_keys, whole_number
from rptrain.utils.units import format_bytes

PIECE = 8 << 20  # bytes that are read at once
MOST = 256 << 20  # characters of a value
_SPACE = re.compile(r"[ \t\r\n]*")
_STRICT = json.JSONDecoder(object_pairs_hook=unique_keys, parse_int=whole_number)
_LENIENT = json.JSONDecoder(parse_int=str)


def values(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """The values of a list with their numbers, from 1. In place of a value with a key twice, or a number of too
    many digits, comes the ValueError.

    Raises ValueError if the file is not a JSON list in UTF-8, and RecursionError if it is nested too deeply.
    """
    for number, value, _ in values_and_texts(file):
        yield number, value


def values_and_texts(file: BinaryIO) -> Iterator[tuple[int, Any, str]]:
    """As `values`, each with its text in the file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, place, lines, ended = "", 0, 1, False

    def read_on(used: int) -> None:
        """Reads at least as much as is left, so that a long value is not tried often."""
        nonlocal text, lines, ended
        lines += text.count("\n", 0, used)
        text = text[used:]
        piece = file.read(max(PIECE, len(text)))
        ended = not piece
        text += decoder.decode(piece, final=ended)

    while not ended and (place := _past(text, text.find("[") + 1)) == len(text):
        read_on(0)
    number, closed = 0, text.startswith("]", place)
    while not closed:
        try:
            value, written, place, closed = _value(text, place)
        except json.JSONDecodeError as error:
            if ended:
                raise ValueError(f"{error.msg} in line {lines + error.lineno - 1:,} (row {number + 1:,})") from error
            if len(text) - place > MOST:
                raise ValueError(f"row {number + 1:,} has a mistake, or more than {format_bytes(MOST)}") from error
            read_on(place)
            place = 0
        else:
            number += 1
            yield number, value, written
    place += not number  # the bracket that closes an empty list
    while _past(text, place) == len(text) and not ended:
        read_on(len(text))
        place = 0
    if _past(text, place) < len(text):
        raise ValueError(f"more text after the list, which ends with row {number:,}")


def _past(text: str, place: int) -> int:
    """The place after white space."""
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()


def _value(text: str, place: int) -> tuple[Any, str, int, bool]:
    """A value, its text, the place after it and the character that separates it from the next one, and whether the list
    ends there.
    """
    start = _past(text, place)
    try:
        value, end = _STRICT.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        value, end = error, _LENIENT.raw_decode(text, start)[1]
    place = _past(text, end)
    if not text.startswith((",", "]"), place):
        raise json.JSONDecodeError("Expecting ',' or ']'", text, place)
    return value, text[start:end], place + 1, text.startswith("]", place)
