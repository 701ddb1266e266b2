"""A line that is typed into, of which a terminal obeys nothing: values come from files and from pastes too."""

from rich.segment import Segment
from textual.strip import Strip
from textual.widgets import Input

from rptrain.utils.text import one_line


class Entry(Input):
    """Its value is as it was given; what is drawn has pictures in the place of control characters."""

    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        if strip.text.isprintable():
            return strip
        drawn = Strip([Segment(one_line(text), style) for text, style, _ in strip])
        return drawn.crop(0, self.size.width)
