"""The last line of a screen: its keys, and F1, which lists all, at the right end of a terminal of any width."""

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Footer, Label


class KeyBar(Footer):
    def __init__(self) -> None:
        super().__init__(show_command_palette=False)

    def compose(self) -> ComposeResult:
        yield HelpKey()
        yield from super().compose()


class HelpKey(Label):
    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__(Content.assemble(("F1", "bold $footer-key-foreground"), " keys"))

    def on_mouse_down(self) -> None:
        self.app.simulate_key("f1")
