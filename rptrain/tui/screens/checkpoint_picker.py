"""The dialog for the checkpoint that answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from rptrain.tui.screens.dialog import Dialog
from rptrain.utils.text import one_line


class CheckpointPicker(Dialog[Path | None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, run: Path, found: Sequence[Path]) -> None:
        super().__init__()
        self._run, self._found = run, found

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(f"Answer with which model of {one_line(self._run.name)}?", classes="question", markup=False)
            names = [one_line(str(path.relative_to(self._run))) for path in self._found]
            yield OptionList(*(Option(Content(name)) for name in names), compact=True)
            detail = "enter: choose; esc: cancel" if names else "It has no exported model and no checkpoint yet."
            yield Static(detail, classes="detail")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.answer(self._found[event.option_index])

    def action_cancel(self) -> None:
        self.answer(None)
