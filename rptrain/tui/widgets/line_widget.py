"""A widget of lines of text, of which only those that changed are drawn again: that is what watching a run costs."""

from collections.abc import Iterable

from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from rptrain.utils.text import one_line


class LineWidget(Widget):
    """`lines` says what stands there, at the size of now; `redraw` asks for it."""

    ALLOW_SELECT = False  # each line is drawn alone, a selection goes over several
    DEFAULT_CSS = "LineWidget { text-wrap: nowrap; text-overflow: clip; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.auto_links = False
        self._drawn: list[Content] = []

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
        return Visual.to_strips(self, self._drawn[y], self.size.width, 1, self.visual_style)[0]


def _clean(line: Content) -> Content:
    """What records say stands in it too: nothing there is obeyed by the terminal."""
    return line if line.plain.isprintable() else Content(one_line(line.plain), list(line.spans))
