"""The dialog for the target of an export."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Static

from rptrain.tui.screens.dialog import Dialog
from rptrain.tui.services.paths import PathSuggester
from rptrain.tui.widgets.choice import Choice
from rptrain.tui.widgets.entry import Entry
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded
from rptrain.utils.text import one_line


@dataclass(frozen=True)
class Target:
    path: Path
    merge: bool


class AskTarget(Dialog[Target | None]):
    """`adapters`: whether the run trains adapters, which can be merged."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, run: Path, adapters: bool) -> None:
        super().__init__()
        self._run, self._adapters = run, adapters

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(f"Export {one_line(self._run.name)}", classes="question", markup=False)
            with Horizontal(classes="row"):
                yield Label("to", classes="label")
                yield Entry(f"{one_line(str(self._run))}-export", suggester=PathSuggester(), id="to", compact=True)
            if self._adapters:
                with Horizontal(classes="row"):
                    yield Label("write", classes="label")
                    yield Choice(("adapter", "merged model"), "adapter", id="merge")
            yield Static("the last checkpoint, in the layout of Hugging Face", classes="detail")
            with Horizontal(classes="answers"):
                yield Button("Cancel (esc)", id="cancel", compact=True)
                yield Button("Export (enter)", id="export", variant="primary", compact=True)

    def on_mount(self) -> None:
        self.query_one("#to").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "export":
            self._done()
        else:
            self.answer(None)

    def on_input_submitted(self) -> None:
        self._done()

    def action_cancel(self) -> None:
        self.answer(None)

    def _done(self) -> None:
        if text := self.query_one("#to", Input).value.strip():
            merge = self._adapters and self.query_one("#merge", Choice).value == "merged model"
            try:
                self.answer(Target(expanded(text), merge))
            except UserError as error:
                self.notify(str(error), severity="error")
