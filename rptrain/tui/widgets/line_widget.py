"""A widget with lines of text that redraws only changed lines, which keeps watching a run cheap."""

from collections.abc import Iterable

from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from rptrain.utils.text import one_line


class LineWidget(Widget):
    """`lines` returns the content for the current size; `redraw` updates it."""

    ALLOW_SELECT = False  # lines are drawn separately, but a selection may span several
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
    """Replaces control characters, which records may contain."""
    return line if line.plain.isprintable() else Content(one_line(line.plain), list(line.spans))
