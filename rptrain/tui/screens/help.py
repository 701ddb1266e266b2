"""Help: the keys of the current screen."""

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

EVERYWHERE = (
    ("F2 F3 F4", "New run, Runs, Doctor"),
    ("ctrl+p", "find a command by name"),
    ("tab shift+tab", "next / previous pane"),
    ("esc", "back"),
    ("F8", "save a picture of the screen (SVG)"),
    ("F9", "light or dark"),
    ("F1 ?", "this page"),
    ("ctrl+q", "quit; runs continue"),
)


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,f1,enter", "dismiss", "close")]

    def __init__(self, title: str, keys: Iterable[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._keys = title, tuple(keys)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(self._text())

    def _text(self) -> Content:
        lines: list[Content] = []
        for title, keys in ((self._title, self._keys), ("Everywhere", EVERYWHERE)):
            lines.append(Content.styled(title, "bold"))
            lines += [Content.assemble("  ", (f"{key:<15}", "$accent"), does) for key, does in keys]
            lines.append(Content(""))
        return Content("\n").join(lines).rstrip()
