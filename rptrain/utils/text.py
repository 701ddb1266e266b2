"""Text for terminals: without control characters, counted, cut to a width."""

from rich.cells import cell_len, set_cell_size

_PICTURES = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)  # C1, lines, bidi
    | dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)  # surrogates: undecodable bytes of a file's name
)
_LINE_PICTURES = _PICTURES | {ord(letter): 0x2400 + ord(letter) for letter in "\n\t"}


def printable(text: str) -> str:
    """Replaces control characters except line ends and tabs; keeps the length."""
    return text.translate(_PICTURES)


def one_line(text: str) -> str:
    """Replaces control characters, line ends and tabs too, for names within a line; keeps the length."""
    return text.translate(_LINE_PICTURES)


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 sample" or "1,200 samples"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def clipped(text: str, width: int) -> str:
    """Text in at most `width` columns of a terminal, with an ellipsis if it was cut."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"
