"""Text from files and models without what a terminal would obey: control characters become pictures of themselves."""

_PICTURES = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)  # C1, lines, bidi
    | dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)  # surrogates: bytes of a file's name that are no text
)
_LINE_PICTURES = _PICTURES | {ord(letter): 0x2400 + ord(letter) for letter in "\n\t"}


def printable(text: str) -> str:
    """As long as `text`; line ends and tabs stay."""
    return text.translate(_PICTURES)


def one_line(text: str) -> str:
    """As long as `text`; line ends and tabs become pictures too: for names, which stand in a line."""
    return text.translate(_LINE_PICTURES)
