"""A confirmation dialog, in which the safe answer has the focus, unless the other one can be taken back."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Static

from rptrain.tui.dialogs.dialog import Dialog
from rptrain.utils.text import one_line

MARK = "▸ "  # of the answer that Enter gives, which colors show as well


class Answer(Button):
    """A button that is marked while it has the focus."""

    def __init__(self, text: str, *, id: str, danger: bool | None = None) -> None:
        """`danger`: whether what it begins cannot be taken back; None for the answer that begins nothing."""
        variant = "default" if danger is None else "error" if danger else "primary"
        super().__init__(" " * len(MARK) + text, id=id, variant=variant, compact=True)
        self._text = text

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        self.label = (MARK if has_focus else " " * len(MARK)) + self._text


class Confirm(Dialog[bool]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no"),
        Binding("left,right", "app.focus_next", "other", show=False),
    ]

    def __init__(self, question: str, yes: str, detail: str = "", *, harmless: bool = False) -> None:
        """`harmless`: what is asked can be taken back, and Enter agrees to it."""
        super().__init__()
        self._harmless = harmless
        self._question, self._yes, self._detail = one_line(question), yes, one_line(detail)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, classes="question", markup=False)
            if self._detail:
                yield Static(self._detail, classes="detail", markup=False)
            with Horizontal(classes="answers"):
                yield Answer("No (n)", id="no")
                yield Answer(f"{self._yes} (y)", id="yes", danger=not self._harmless)

    def on_mount(self) -> None:
        self.query_one("#yes" if self._harmless else "#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.answer(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.answer(yes)
