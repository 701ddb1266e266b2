"""An input for values that may come from a file or a paste."""

from rich.segment import Segment
from textual.strip import Strip
from textual.widgets import Input

from rptrain.tui.widgets.bindings import ALT_DIGITS
from rptrain.utils.text import one_line


class Entry(Input):
    """An input that keeps its value, but draws control pictures in place of control characters.

    What gets the focus, or another value, is selected: typing replaces it.
    """

    def put(self, value: str) -> None:
        """Sets a value that was not typed."""
        self.value = value
        self.select_all()

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Leaves alt and a digit to a screen that binds them."""
        return key not in ALT_DIGITS and super().check_consume_key(key, character)

    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        if strip.text.isprintable():
            return strip
        drawn = Strip([Segment(one_line(text), style) for text, style, _ in strip])
        return drawn.crop(0, self.size.width)
