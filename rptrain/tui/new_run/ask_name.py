"""The dialog for the name of a config file."""

from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Static

from rptrain.tui.dialogs.dialog import Dialog
from rptrain.tui.services.paths import PathSuggester
from rptrain.tui.widgets.entry import Entry
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded

SUFFIX = ".toml"


class AskName(Dialog[Path | None]):
    """Asks under which name a config is saved; a name without a suffix gets one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("Save the config as", classes="question")
            with Horizontal(classes="row"):
                yield Label("file", classes="label")
                yield Entry(str(self._path), suggester=PathSuggester((SUFFIX,)), id="name", compact=True)
            with Horizontal(classes="answers"):
                yield Button("Cancel (esc)", id="cancel", compact=True)
                yield Button("Save (enter)", id="save-as", variant="primary", compact=True)

    def on_mount(self) -> None:
        self.query_one("#name").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "save-as":
            self.on_input_submitted()
        else:
            self.answer(None)

    def on_input_submitted(self) -> None:
        if text := self.query_one("#name", Input).value.strip():
            try:
                path = expanded(text)
            except UserError as error:
                self.notify(str(error), severity="error")
            else:
                self.answer(path if path.suffix else path.with_suffix(SUFFIX))

    def action_cancel(self) -> None:
        self.answer(None)
