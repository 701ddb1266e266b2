"""The last line of a screen: the keys that there is room for, and F1, which lists all, at the right end."""

from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Footer, Label
from textual.widgets._footer import FooterKey

HELP = 9  # columns of F1
PADDING = 3  # columns of a key beside its name and its description


class KeyBar(Footer):
    def __init__(self) -> None:
        super().__init__(show_command_palette=False)

    def compose(self) -> ComposeResult:
        yield HelpKey()
        yield from self._fitted(super().compose())

    def on_resize(self) -> None:
        list(self._fitted(self.query(FooterKey)))

    def _fitted(self, widgets: Iterable[Widget]) -> Iterator[Widget]:
        """The same; keys are hidden from the first one on that does not fit."""
        room = self.app.size.width - HELP
        for widget in widgets:
            if isinstance(widget, FooterKey):
                room -= cell_len(widget.key_display) + cell_len(widget.description) + PADDING
                widget.display = room >= 0
            yield widget


class HelpKey(Label):
    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__(Content.assemble(("F1", "bold $footer-key-foreground"), " keys"))

    def on_mouse_down(self) -> None:
        self.app.simulate_key("f1")
