"""The last line of a screen: its keys, and F1, which lists all, at the right end of a terminal of any width."""

from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey


class KeyBar(Footer):
    def __init__(self) -> None:
        super().__init__(show_command_palette=False)

    def compose(self) -> ComposeResult:
        yield FooterKey("f1", "F1", "keys", "app.help", classes="-command-palette")
        yield from super().compose()
