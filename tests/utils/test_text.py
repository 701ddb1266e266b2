"""Messages: what they replace, and how long they may be."""

import re

import pytest

from rptrain.utils.text import LINE, LINES, as_message, quoted, wrapped_parts


def test_control_characters_are_replaced():
    assert as_message("\x1b[2J\x9b\u202e\ud800\r\0") == "␛[2J\ufffd\ufffd\ufffd␍␀"
    assert as_message("a\n\tb") == "a\n\tb"


@pytest.mark.parametrize(("count", "end"), [(20, "19"), (21, "… and 1 more line"), (1034, "… and 1,014 more lines")])
def test_more_lines_are_counted(count, end):
    lines = as_message("\n".join(map(str, range(count)))).split("\n")
    assert lines[:LINES] == [str(number) for number in range(LINES)]
    assert lines[-1] == end


def length(line: str) -> int:
    """The characters of a line before its middle was cut out once."""
    begin, middle, end = re.split("…", line)
    return len(begin) + int(middle.split()[0].replace(",", "")) + len(end)


def test_the_middle_of_a_long_line_is_counted_and_its_end_shown():
    assert as_message("x" * LINE) == "x" * LINE
    line = as_message(f"`{'x' * 10_000}`: write key=value")
    assert len(line) <= LINE and line.startswith("`xxx") and line.endswith("xxx`: write key=value")
    assert length(line) == len(f"`{'x' * 10_000}`: write key=value")


def test_a_message_within_a_message_keeps_its_counts():
    message = as_message("\n".join(["x" * 100_000] * 100))
    assert as_message(message) == message
    around = as_message(f"{'y' * 200}:\n{message}").split("\n")
    assert around[1:LINES] == message.split("\n")[: LINES - 1] and around[-1] == "… and 81 more lines"
    before = as_message(f"{'y' * 200}{message}").split("\n")
    assert before[1:] == message.split("\n")[1:] and length(before[0]) == 100_200


def test_values_in_messages():
    assert quoted("x" * 60) == "x" * 60
    assert quoted("x" * 61) == "x" * 59 + "…"


def test_parts_fill_lines_and_are_not_broken() -> None:
    assert wrapped_parts(["one two", "three", "four five six"], 16) == "one two  three\nfour five six"
    assert wrapped_parts(["one two", "three"], 3) == "one two\nthree", "a longer part has a line"
    assert wrapped_parts([], 16) == ""
    assert wrapped_parts(["ご飯", "ab"], 7) == "ご飯\nab", "in columns"
