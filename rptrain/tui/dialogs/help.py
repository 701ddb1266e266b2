"""Help: the keys of the current screen."""

import textwrap
from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

WIDTH, AROUND, INDENT = 76, 6, 17  # columns: of the dialog, of its border and scrollbar, and of the keys
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


def meaning(keys: Iterable[tuple[str, str]], key: str) -> str:
    """What a key does according to lines of keys, which may name several and what each does; empty if none has it."""
    for names, does in keys:
        named = names.split()
        if key in named:
            each = does.split("; ")
            return each[named.index(key)] if len(each) == len(named) else does
    return ""


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,f1,enter", "dismiss", "close")]

    def __init__(self, title: str, keys: Iterable[tuple[str, str]], *, in_dialog: bool = False) -> None:
        """`in_dialog`: the keys of all screens do not work."""
        super().__init__()
        self._sections = ((title, tuple(keys)), *([] if in_dialog else [("Everywhere", EVERYWHERE)]))

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static()

    def on_resize(self) -> None:
        width = min(WIDTH, self.size.width * 96 // 100) - AROUND
        self.query_one(Static).update(self._text(max(1, width - INDENT)))

    def _text(self, width: int) -> Content:
        """The keys, and in the columns beside them, `width` wide, what they do."""
        lines: list[Content] = []
        for title, keys in self._sections:
            lines.append(Content.styled(title, "bold"))
            for key, does in keys:
                first, *further = textwrap.wrap(does, width)
                lines.append(Content.assemble("  ", (f"{key:<{INDENT - 2}}", "$accent"), first))
                lines += [Content(" " * INDENT + line) for line in further]
            lines.append(Content(""))
        return Content("\n").join(lines).rstrip()
