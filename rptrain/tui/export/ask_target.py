"""The dialog for what to export, and where to."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Static

from rptrain.checkpoint.export_progress import is_export
from rptrain.tui.dialogs.confirm import Confirm
from rptrain.tui.dialogs.dialog import Dialog
from rptrain.tui.services.paths import PathSuggester
from rptrain.tui.widgets.choice import Choice
from rptrain.tui.widgets.entry import Entry
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded
from rptrain.utils.text import one_line

RESULT = "result"
SAME = "as trained"
DTYPES = (SAME, "bfloat16", "float16", "float32")
PARTS = ("adapter", "merged model")


class ExportChoice(Choice):
    """A choice in which Enter starts the export, as in the path."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "screen.export", show=False)]


@dataclass(frozen=True)
class Target:
    """An export: of a run, which stands for its result, or of a checkpoint."""

    source: Path
    path: Path
    dtype: str | None
    merge: bool


class AskTarget(Dialog[Target | None]):
    """`checkpoints`: the complete ones, the newest first. `adapters`: whether the run trains adapters to merge. `best`:
    the checkpoint with the lowest validation loss, which is marked. `step`: that of the run's result, if it is known.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "cancel"),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    def __init__(
        self,
        run: Path,
        checkpoints: Sequence[Path],
        adapters: bool,
        best: Path | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__()
        self._run, self._adapters = run, adapters
        self._result = RESULT if step is None else f"{RESULT} (step {step})"
        self._sources = {self._result: run}
        for path in checkpoints:
            mark = " (lowest validation loss)" if path == best else ""
            self._sources[path.name.replace("checkpoint-", "step ") + mark] = path

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(f"Export {one_line(self._run.name)}", classes="question", markup=False)
            with Horizontal(classes="row"):
                yield Label("to", classes="label")
                yield Entry(f"{one_line(str(self._run))}-export", suggester=PathSuggester(), id="to", compact=True)
            with Horizontal(classes="row"):
                yield Label("checkpoint", classes="label")
                yield ExportChoice(tuple(self._sources), self._result, id="source")
            with Horizontal(classes="row"):
                yield Label("data type", classes="label")
                yield ExportChoice(DTYPES, SAME, id="dtype")
            if self._adapters:
                with Horizontal(classes="row"):
                    yield Label("write", classes="label")
                    yield ExportChoice(PARTS, PARTS[0], id="merge")
            detail = "↑ ↓ move, ← → change, enter exports. The folder has the layout of Hugging Face."
            yield Static(detail, classes="detail")
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

    def action_export(self) -> None:
        self._done()

    def action_cancel(self) -> None:
        self.answer(None)

    @work(exclusive=True)
    async def _done(self) -> None:
        text = self.query_one("#to", Input).value.strip()
        dtype = self.query_one("#dtype", Choice).value  # before the wait below: keys may follow
        merge = self._adapters and self.query_one("#merge", Choice).value == PARTS[1]
        source = self._sources[self.query_one("#source", Choice).value]
        if not text or not self.is_active:
            return
        try:
            path = expanded(text)
            if os.path.lexists(path) and not await self._may_replace(path):
                return
        except UserError as error:
            self.notify(str(error), severity="error")
            return
        self.answer(Target(source, path, None if dtype == SAME else dtype, merge))

    async def _may_replace(self, path: Path) -> bool:
        """Whether an existing folder may be replaced. Raises UserError if an export did not write it."""
        found = await asyncio.to_thread(_found, path)
        if found == "other":
            raise UserError(f"{path} exists, and an export did not write it: name another folder")
        if found == "empty":
            return True
        detail = f"{path} holds an earlier export. It is replaced when the new one is complete."
        return bool(await self.app.push_screen_wait(Confirm(f"Replace {path.name}?", "Replace", detail)))


def _found(path: Path) -> Literal["export", "empty", "other"]:
    """What is at the path. A link is never replaced."""
    if path.is_symlink() or not path.is_dir():
        return "other"
    try:
        return "export" if is_export(path) else "other" if any(path.iterdir()) else "empty"
    except OSError:  # it may not be read
        return "other"
