"""Export of a run from any screen, in a process that continues when the interface closes."""

import asyncio
from contextlib import suppress
from pathlib import Path

from textual.app import App
from textual.screen import Screen

from rptrain.runs.run_dir import RunDir
from rptrain.tui.context import Context
from rptrain.tui.screens.ask_path import AskTarget
from rptrain.tui.screens.dialog import ask
from rptrain.tui.services.launch import Launched, export
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text

PAUSE = 0.3  # seconds between two checks for its end


async def export_run(screen: Screen[None], context: Context, run: Path) -> None:
    """Asks for a target and exports. A notification on any screen reports the end."""
    target = await ask(screen, AskTarget(run, has_adapters(run)))
    if target is None:
        return
    try:
        launched = export(run, target.path, target.merge, context.environment)
    except UserError as error:
        screen.notify(str(error), severity="error")
        return
    screen.notify(f"exporting to {target.path} …")
    screen.app.run_worker(_until_done(screen.app, launched), group="export")


async def _until_done(app: App[None], launched: Launched) -> None:
    while launched.running:
        await asyncio.sleep(PAUSE)
    if launched.process.returncode == 0:
        app.notify(f"exported to {launched.path}")
        with suppress(OSError):
            launched.log.unlink()
    else:
        said = launched.said().splitlines()[-3:]
        app.notify("\n".join([*said, f"see {launched.log}"]), severity="error", timeout=15)


def has_adapters(run: Path) -> bool:
    """Whether a run trains adapters."""
    try:
        return "[lora]" in read_small_text(RunDir(run).config_path)
    except (OSError, UserError, UnicodeDecodeError):
        return False
