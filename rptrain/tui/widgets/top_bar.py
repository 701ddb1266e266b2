"""The first line of every screen: the current screen and the others."""

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.events import Click
from textual.widgets import Static

from rptrain.utils.text import one_line

PLACES = (("new", "New run", "F2"), ("runs", "Runs", "F3"), ("doctor", "Doctor", "F4"))


class Tab(Static):
    """A tab; a click opens its screen."""

    def __init__(self, mode: str, name: str, key: str, current: bool) -> None:
        super().__init__(
            Content.assemble((name, "bold" if current else ""), (f" {key}", "$muted")),
            classes="-current" if current else "",
        )
        self._mode = mode

    async def on_click(self, event: Click) -> None:
        event.stop()
        await self.app.run_action(f"go('{self._mode}')")


class TopBar(Horizontal):
    def __init__(self, current: str, right: str = "") -> None:
        super().__init__()
        self._current, self._right = current, one_line(right)

    def compose(self) -> ComposeResult:
        yield Static("rptrain", id="brand")
        for mode, name, key in PLACES:
            yield Tab(mode, name, key, mode == self._current)
        yield Static(self._right, id="top-right", markup=False)

    def tell(self, text: str) -> None:
        """Sets the text on the right."""
        self.query_one("#top-right", Static).update(one_line(text))
