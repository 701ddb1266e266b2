"""Export of a run from any screen, in a process that continues when the interface closes."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Button, Static

from rptrain.checkpoint.export_progress import last_record
from rptrain.tui.context import Context
from rptrain.tui.dialogs.dialog import Dialog, ask
from rptrain.tui.export.ask_target import AskTarget
from rptrain.tui.export.saved import best_checkpoint, has_adapters, result_step, saved_checkpoints
from rptrain.tui.services.closing import until_closed
from rptrain.tui.services.launch import Launched, export
from rptrain.tui.widgets.bars import bar
from rptrain.utils.errors import UserError
from rptrain.utils.text import one_line, printable
from rptrain.utils.units import format_bytes

PAUSE = 0.3  # seconds between two readings of its output
BAR = 30  # columns
LINES = 3  # of its output that say why it failed
WORDS = {"checking": "checking the checkpoint", "writing": "writing", "reading back": "reading it back"}


@until_closed
async def export_run(screen: Screen[None], context: Context, run: Path) -> None:
    """Asks what to export, exports it, and shows the progress. A notification on any screen reports the end if the
    progress was closed.
    """
    target = await ask(screen, AskTarget(*await context.readings.read(_choices, run)))
    if target is None:
        return
    options = [*(["--merge"] if target.merge else []), *(["--dtype", target.dtype] if target.dtype else [])]
    try:
        launched = export(target.source, target.path, options, context.environment)
    except UserError as error:
        screen.notify(str(error), severity="error")
        return
    shown = Exporting(target.path)
    screen.app.push_screen(shown)
    screen.app.run_worker(_until_done(screen.app, launched, shown), group="export")


def _choices(run: Path) -> tuple[Path, Sequence[Path], bool, Path | None, int | None]:
    """What `AskTarget` is given."""
    checkpoints = saved_checkpoints(run)
    return run, checkpoints, has_adapters(run), best_checkpoint(run, checkpoints), result_step(run)


async def _until_done(app: App[None], launched: Launched, shown: "Exporting") -> None:
    while launched.running:
        shown.show(last_record(launched.said()))
        await asyncio.sleep(PAUSE)
    said = launched.said()
    found = last_record(said)
    if launched.process.returncode == 0:
        with suppress(OSError):
            launched.log.unlink()
        code, step = str(found.get("code", "")), found.get("step")
        done = f"{'' if step is None else f'step {step} '}exported to {launched.path}"
        done = "\n".join(filter(None, [done, str(found.get("note", ""))]))
        if not shown.finish(done, code):
            app.notify(f"{done}\n{code}", timeout=15)
    else:
        lines = [line for line in said.splitlines() if not last_record(line)][-LINES:]
        failure = "\n".join([*lines, f"see {launched.log}"])
        if not shown.finish(failure, failed=True):
            app.notify(failure, severity="error", timeout=15)


class Exporting(Dialog[None]):
    """The progress of an export, and at its end the code that loads it. Closing it does not end the export."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter", "close", "close"),
        Binding("y", "copy", "copy the code"),
    ]

    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target
        self._text = Content("the process starts …")
        self._code = ""
        self._is_over = self._is_dismissed = False

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(f"exporting to {one_line(str(self._target))}", classes="question", markup=False)
            yield Static(self._text, id="progress")
            with Horizontal(classes="answers"):
                yield Button("Copy the code (y)", id="copy", compact=True)
                yield Button("", id="close", compact=True)

    def on_mount(self) -> None:
        self.query_one("#close").focus()
        self._update()

    def show(self, found: dict[str, Any]) -> None:
        """Shows a record of the export."""
        match found:
            case {"phase": str(phase), "bytes": int(done), "total": int(total)}:
                sizes = f"  {format_bytes(done)} of {format_bytes(total)}" if total else ""
                share = done / total if total else 0.0
                self._text = Content.assemble(bar(share, BAR, "$primary"), f"\n{WORDS.get(phase, phase)}{sizes}")
                self._update()
            case _:
                pass

    def finish(self, text: str, code: str = "", *, failed: bool = False) -> bool:
        """Shows how it ended. False if the dialog was closed."""
        parts = [Content.styled(printable(text), "$error" if failed else "$success")]
        if code:
            parts.append(Content(f"\nLoad it with:\n\n{printable(code)}"))
        self._text, self._code, self._is_over = Content("\n").join(parts), code, True
        self._update()
        return not self._is_dismissed

    def _update(self) -> None:
        if len(self.query(".question, #progress, #copy, #close")) < 4:  # not composed yet, or it closes
            return
        self.query_one(".question").display = not self._is_over
        self.query_one("#progress", Static).update(self._text)
        self.query_one("#copy").display = bool(self._code)
        close = self.query_one("#close", Button)
        close.label = "Close (esc)" if self._is_over else "Close, it continues (esc)"
        close.refresh(layout=True)  # a label alone leaves a button as wide as it was

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "copy":
            self.action_copy()
        else:
            self.action_close()

    def action_copy(self) -> None:
        if self._code:
            self.app.copy_to_clipboard(self._code)
            self.notify("copied, if the terminal lets programs copy")

    def action_close(self) -> None:
        self._is_dismissed = True
        self.answer(None)
