"""Text from files and models without what a terminal would obey: control characters become pictures of themselves."""

_PICTURES = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)  # or turn lines round
)


def printable(text: str) -> str:
    """As long as `text`; line ends and tabs stay."""
    return text.translate(_PICTURES)
