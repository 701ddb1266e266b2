"""Exporting a run from any screen: where to is asked, the work is the helper's."""

from pathlib import Path

from textual.screen import Screen

from rptrain.errors import UserError
from rptrain.tui import heavy
from rptrain.tui.ask_path import AskTarget
from rptrain.tui.context import Context
from rptrain.tui.helper import HelperError


async def export_run(screen: Screen[None], context: Context, run: Path) -> None:
    """Told in a line at the end; nothing where the person thinks better of it."""
    target = await screen.app.push_screen_wait(AskTarget(run, has_adapters(run)))
    if target is None:
        return
    screen.notify(f"exporting to {target.path} …")
    try:
        where = await context.helper.call(heavy.export, run, target.path, target.merge)
    except (UserError, HelperError) as error:
        screen.notify(str(error), severity="error", timeout=15)
    else:
        screen.notify(f"exported to {where}")


def has_adapters(run: Path) -> bool:
    """Whether adapters are what a run trains."""
    try:
        return "[lora]" in (run / "config.toml").read_text(encoding="utf-8")
    except OSError:
        return False
