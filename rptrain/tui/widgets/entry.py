"""An input whose value, which may come from a file or a paste, cannot send control characters to the terminal."""

from rich.segment import Segment
from textual.strip import Strip
from textual.widgets import Input

from rptrain.utils.text import one_line


class Entry(Input):
    """An input that keeps its value, but draws control pictures in place of control characters."""

    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        if strip.text.isprintable():
            return strip
        drawn = Strip([Segment(one_line(text), style) for text, style, _ in strip])
        return drawn.crop(0, self.size.width)
