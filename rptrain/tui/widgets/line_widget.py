"""A widget with lines of text that redraws only changed lines, which keeps watching a run cheap."""

from collections.abc import Iterable, Iterator

from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style as VisualStyle
from textual.widget import Widget

from rptrain.utils.text import one_line


class LineWidget(Widget):
    """`lines` returns the content for the current size, whose styles do not overlap; `redraw` updates it."""

    ALLOW_SELECT = False  # lines are drawn separately, but a selection may span several

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._drawn: list[Content] = []
        self._styles_for: object = None  # the style of the widget that `_rich_styles` extend
        self._rich_styles: dict[object, Style] = {}  # by the style of a part of a line

    def lines(self) -> Iterable[Content]:
        raise NotImplementedError

    def redraw(self) -> None:
        before, self._drawn = self._drawn, [_clean(line) for line in self.lines()][: self.size.height]
        for y in range(max(len(before), len(self._drawn))):
            if y >= min(len(before), len(self._drawn)) or not before[y].is_same(self._drawn[y]):
                self.refresh(Region(0, y, self.size.width, 1))

    def on_resize(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        if y >= len(self._drawn) or not self._drawn[y] or self.size.width < 1:
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        return Strip(self._segments(self._drawn[y])).crop(0, self.size.width)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._rich_styles.clear()

    def _segments(self, line: Content) -> Iterator[Segment]:
        """The parts of a line. Textual's own conversion makes a new style for each, which takes most of its time."""
        text, end = line.plain, 0
        for span in line.spans:
            if span.start > end:
                yield Segment(text[end : span.start], self._rich_style(""))
            yield Segment(text[span.start : span.end], self._rich_style(span.style))
            end = span.end
        if end < len(text):
            yield Segment(text[end:], self._rich_style(""))

    def _rich_style(self, style: VisualStyle | str) -> Style:
        base = self.visual_style
        if base is not self._styles_for:
            self._styles_for = base
            self._rich_styles.clear()
        if style not in self._rich_styles:
            self._rich_styles[style] = (base + self._get_style(style) if style else base).rich_style
        return self._rich_styles[style]


def _clean(line: Content) -> Content:
    """Replaces control characters, which records may contain."""
    return line if line.plain.isprintable() else Content(one_line(line.plain), list(line.spans))
