"""A share of something as a line of text, to half a character."""

from textual.content import Content


def bar(share: float, width: int, style: str) -> Content:
    """`share` from 0 to 1 of `width` characters; what is left is a thinner line. What is there at all is seen."""
    halves = round(min(max(share, 0.0), 1.0) * width * 2)
    if share > 0:
        halves = max(halves, 1)
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    return Content.assemble((filled, style), ("─" * (width - len(filled)), "$faint"))
