"""The last line of a screen: the keys that fit, and F1, which lists all, at the right end."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Label
from textual.widgets._footer import FooterKey

HELP = 9  # columns of F1
PADDING = 3  # columns of a key beside its name and its description


class KeyBar(Footer):
    """Is made again only if its keys change: the focus changes with every key that moves it."""

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._made: list[tuple[str, str, bool]] = []  # of each key: its name, what it does, whether it can be pressed

    def compose(self) -> ComposeResult:
        yield HelpKey()
        yield from self._fitted(super().compose())

    def bindings_changed(self, screen: Screen[Any]) -> None:
        bindings = [active for active in screen.active_bindings.values() if active.binding.show]
        made = [(active.binding.key, active.binding.description, active.enabled) for active in bindings]
        if made != self._made and screen is self.screen and screen.app.app_focus:
            self._made = made
            super().bindings_changed(screen)

    def on_resize(self) -> None:
        list(self._fitted(self.query(FooterKey)))

    def _fitted(self, widgets: Iterable[Widget]) -> Iterator[Widget]:
        """The same; keys are hidden from the first one on that does not fit."""
        width = self.app.size.width - HELP
        for widget in widgets:
            if isinstance(widget, FooterKey):
                width -= cell_len(widget.key_display) + cell_len(widget.description) + PADDING
                widget.display = width >= 0
            yield widget


class HelpKey(Label):
    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__(Content.assemble(("F1", "bold $footer-key-foreground"), " keys"))

    def on_mouse_down(self) -> None:
        self.app.simulate_key("f1")
