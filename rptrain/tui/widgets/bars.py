"""A bar of text for a fraction, with a resolution of half a character."""

from textual.content import Content


def bar(share: float, width: int, style: str) -> Content:
    """A bar of `width` characters for `share` from 0 to 1; the rest is a thinner line. A share above 0 is visible."""
    halves = round(min(max(share, 0.0), 1.0) * width * 2)
    if share > 0:
        halves = max(halves, 1)
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    return Content.assemble((filled, style), ("─" * (width - len(filled)), "$faint"))
