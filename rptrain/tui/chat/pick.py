"""A dialog with a few lines to choose from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from rptrain.tui.dialogs.dialog import Dialog
from rptrain.utils.text import one_line


@dataclass(frozen=True)
class PickLine:
    text: str
    enabled: bool = True


class Pick(Dialog[int | None]):
    """Answers with the number of a line. `current`: the line with the highlight; `empty`: shown without any lines."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, question: str, lines: Sequence[PickLine], current: int = 0, empty: str = "") -> None:
        super().__init__()
        self._question, self._lines, self._current, self._empty = one_line(question), lines, current, empty

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, classes="question", markup=False)
            options = (Option(Content(one_line(line.text)), disabled=not line.enabled) for line in self._lines)
            yield OptionList(*options, compact=True)
            yield Static("enter: choose; esc: cancel" if self._lines else self._empty, classes="detail")

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        options.focus()
        if self._lines:
            options.highlighted = self._current

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.answer(event.option_index)

    def action_cancel(self) -> None:
        self.answer(None)
