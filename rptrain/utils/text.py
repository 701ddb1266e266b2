"""Text for terminals: without control characters, counted, cut to a width or a number of lines."""

import re
from collections.abc import Iterable
from typing import TextIO

from rich.cells import cell_len, set_cell_size

LINES, LINE = 20, 500  # lines of a message, without the one that counts the others; characters of a line
QUOTED = 60  # characters of a value in a message
_END = 120  # characters of the end of a longer line, which may say what to do
_MORE_LINES = re.compile(r"… and ([\d,]{1,20}) more lines?")
_MORE_CHARACTERS = re.compile(r"… ([\d,]{1,20}) more characters …")

_PICTURES = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)  # C1, lines, bidi
    | dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)  # surrogates: undecodable bytes of a file's name
)
_LINE_PICTURES = _PICTURES | {ord(letter): 0x2400 + ord(letter) for letter in "\n\t"}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal. Python has None for one that was closed before it started."""
    return stream is not None and stream.isatty()


def printable(text: str) -> str:
    """Replaces control characters except line ends and tabs; keeps the length."""
    return text.translate(_PICTURES)


def one_line(text: str) -> str:
    """Replaces control characters, line ends and tabs too, for names within a line; keeps the length."""
    return text.translate(_LINE_PICTURES)


def as_message(text: str, most: int = LINES) -> str:
    """Text as a message: control characters replaced, and at most `most` lines of at most LINE characters.

    The middle of a longer line, and lines after the last one, are counted instead: "… 9,123 more characters …", "… and
    14 more lines". A message within another message keeps its counts, and a message stays as it is.
    """
    first, more = _split(text, most)
    lines = [_cut(line).translate(_PICTURES) for line in first]
    if more:
        lines.append(more_lines(more))
    return "\n".join(lines)


def more_lines(number: int) -> str:
    """The last line of a message that counts the lines which are left out."""
    return f"… and {counted(number, 'more line')}"


def _split(text: str, most: int) -> tuple[list[str], int]:
    """The first lines, and the number of the others."""
    first = text.split("\n", most)
    if len(first) <= most:
        return first, 0
    others = first.pop()
    more, last = others.count("\n"), others.rpartition("\n")[2]
    left_out = _MORE_LINES.fullmatch(last)
    return first, more + (_number(left_out) if left_out else 1)


def _cut(line: str) -> str:
    if len(line) <= LINE:
        return line
    begin = LINE - _END - len(f"… {len(line):,} more characters …")
    middle = line[begin:-_END]
    # A count that is not cut in two stands for what it counts
    counts = list(_MORE_CHARACTERS.finditer(middle)) if len(middle) <= LINE else []
    more = len(middle) + sum(_number(found) - len(found[0]) for found in counts)
    return f"{line[:begin]}… {more:,} more characters …{line[-_END:]}"


def _number(found: re.Match[str]) -> int:
    return int(found[1].replace(",", "") or 0)


def quoted(text: str) -> str:
    """A value in a message: itself, or the beginning of one that is longer than QUOTED characters."""
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 1]}…"


def not_utf8(byte: int) -> str:
    """Says that bytes are not UTF-8 text, and the first one that is not."""
    return f"not UTF-8 text (byte 0x{byte:02x})"


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 sample" or "1,200 samples"."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("ch") else f"{noun}s"


def about(number: int, *, exact: bool) -> str:
    """A number, such as "1,234"; if it is not `exact`, with three digits: "about 1,230"."""
    return f"{number:,}" if exact else f"about {round(number, 3 - len(str(number))):,}"


def counted_about(number: int, noun: str, *, exact: bool) -> str:
    """A number of things, such as "1,234 samples" or "about 1,230 samples"."""
    return f"{about(number, exact=exact)} {noun if number == 1 else plural(noun)}"


def wrapped_parts(parts: Iterable[str], width: int) -> str:
    """Parts in lines of at most `width` columns, as many as fit in each, with two spaces between them.

    Only a part that is longer alone makes a longer line.
    """
    lines = list[str]()
    for part in parts:
        if lines and cell_len(f"{lines[-1]}  {part}") <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def clipped(text: str, width: int) -> str:
    """Text in at most `width` columns of a terminal, with an ellipsis if it was cut."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"
